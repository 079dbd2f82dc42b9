// Command followercounts keeps the counts and the pages of edges, of every kind: who follows whom, who likes what. Any number of them may run at once.
package main

import "github.com/tidings/tidings/cmd/internal/services"

func main() { services.FollowerCounts() }
