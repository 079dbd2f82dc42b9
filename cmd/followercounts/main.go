// Command followercounts keeps the counts and lists of edges of every kind, for example follows and
// likes. Any number of instances may run at once.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.FollowerCounts() }
