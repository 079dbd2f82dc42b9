// Command relay publishes the outbox to JetStream. Any number of instances may run at once.
package main

import "github.com/tidings/tidings/cmd/internal/relayservice"

func main() { relayservice.Main() }
