// Command tidings is the command line for people. It runs the whole system on one machine, migrates
// databases, creates tokens, loads graphs, and checks whether every write has arrived everywhere.
// Started through a link named api, relay, followercounts, threadcache or archiver, it runs that
// service, so the container image needs one binary.
package main

import (
	"os"
	"path/filepath"

	"github.com/tidings/tidings/cmd/internal/services"
	"github.com/tidings/tidings/cmd/tidings/cli"
)

func main() {
	if service := services.Named(filepath.Base(os.Args[0])); service != nil {
		service() // does not return
	}
	os.Exit(cli.Main(os.Args[1:]))
}
