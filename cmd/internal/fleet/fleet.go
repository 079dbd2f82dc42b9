package fleet

import (
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// Projections returns every projection, in the order of reports. now returns the kinds in force
// (catalog.Catalog.Now); the projections call it whenever they need them.
func Projections(now func() *kinds.Set) []projections.Projection {
	return []projections.Projection{followercounts.New(now), threadcache.New(now), history.New(now)}
}

// Names returns the names of the projections, which are also the names of their consumers.
func Names() (names []string) {
	for _, p := range Projections(kinds.Builtin) {
		names = append(names, p.Name())
	}
	return names
}
