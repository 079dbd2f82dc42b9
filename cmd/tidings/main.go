// Command tidings is the one that a person uses: it runs the whole system on one machine, migrates databases, makes tokens,
// loads graphs, and tells whether everything that was written has arrived everywhere.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/sethvargo/go-envconfig"

	"github.com/tidings/tidings/cmd/tidings/cli"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends the process at once
	os.Exit(cli.Main(ctx, os.Args[1:], cli.Process{Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Env: envconfig.OsLookuper()}))
}
