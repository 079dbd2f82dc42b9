// Package services has the long-running processes of a fleet, one file each: it reads their environment and wires their parts. Each function runs a
// service until SIGTERM and ends the process. Command tidings runs the one by whose name it is called, so that one binary serves the whole image.
package services

import (
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// Named returns the service of a name, which is that of its command; nil if there is none.
func Named(name string) func() {
	switch name { // not a map, which would link every service into every command
	case "api":
		return API
	case "relay":
		return Relay
	case followercounts.Name:
		return FollowerCounts
	case threadcache.Name:
		return ThreadCache
	case history.Name:
		return Archiver
	}
	return nil
}
