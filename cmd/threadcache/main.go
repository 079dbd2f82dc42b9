// Command threadcache keeps the threads of children of every kind, for example comments. Any number
// of instances may run at once.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.ThreadCache() }
