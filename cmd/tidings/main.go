// Command tidings is the one that a person uses: it runs the whole system on one machine, migrates databases, makes tokens,
// loads graphs, and tells whether everything that was written has arrived everywhere. Called as api, relay, followercounts, threadcache or
// archiver, through a link of that name, it is that service: so the image has one binary.
package main

import (
	"os"
	"path/filepath"

	"github.com/tidings/tidings/cmd/internal/services"
	"github.com/tidings/tidings/cmd/tidings/cli"
)

func main() {
	if service := services.Named(filepath.Base(os.Args[0])); service != nil {
		service() // ends the process
	}
	os.Exit(cli.Main(os.Args[1:]))
}
