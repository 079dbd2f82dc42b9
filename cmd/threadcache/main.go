// Command threadcache keeps the threads of comments. Any number of them may run at once.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.ThreadCache() }
