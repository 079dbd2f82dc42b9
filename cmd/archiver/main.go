// Command archiver records the histories and runs the scheduled jobs: see services.Archiver.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.Archiver() }
