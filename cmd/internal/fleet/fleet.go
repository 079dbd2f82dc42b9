// Package fleet names all projections of the system. A new one is its folder, its migration, and its line here.
package fleet

import (
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// Projections returns every projection, in the order in which reports name them. now returns the kinds that are in force, whenever
// they are needed: kinds.Catalog.Now.
func Projections(now func() *kinds.Set) []projections.Projection {
	return []projections.Projection{followercounts.New(now), threadcache.New(now), history.New(now)}
}

// Names returns the names of the projections, which are their consumers' too.
func Names() (names []string) {
	for _, p := range Projections(kinds.Builtin) {
		names = append(names, p.Name())
	}
	return names
}
