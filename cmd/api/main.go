// Command api answers HTTP. Any number of them may run at once, with the same API_CURSOR_KEY.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.API() }
