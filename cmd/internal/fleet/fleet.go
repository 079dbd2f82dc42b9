// Package fleet names all projections of the system. A new one is its folder, its migration, and its line here.
package fleet

import (
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/history"
	"github.com/tidings/tidings/projections/threadcache"
)

// Projections returns every projection, in the order in which reports name them.
func Projections() []projections.Projection {
	return []projections.Projection{followercounts.New(), threadcache.New(), history.New()}
}

// Names returns the names of the projections, which are their consumers' too.
func Names() (names []string) {
	for _, p := range Projections() {
		names = append(names, p.Name())
	}
	return names
}
