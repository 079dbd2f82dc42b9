package services

import (
	"github.com/tidings/tidings/cmd/internal/relayservice"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// Named returns the service with the name of its command, or nil if no service has the name.
func Named(name string) func() {
	switch name { // not a map, which would link every service into every command
	case apiName:
		return API
	case relayName:
		return relayservice.Main
	case followercounts.Name:
		return FollowerCounts
	case threadcache.Name:
		return ThreadCache
	case history.Name:
		return Archiver
	}
	return nil
}
