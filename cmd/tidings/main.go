// Command tidings is the one that a person uses: it runs the whole system on one machine, migrates databases, makes tokens,
// loads graphs, and tells whether everything that was written has arrived everywhere.
package main

import (
	"os"

	"github.com/tidings/tidings/cmd/tidings/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:])) }
