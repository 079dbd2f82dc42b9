// Command api serves the HTTP API. Any number of instances may run at once, with the same
// API_CURSOR_KEY.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.API() }
