package testkit

import (
	"testing"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

// Kinds returns the built-in kinds with those of a file added.
func Kinds(t testing.TB, file string) *kinds.Set {
	t.Helper()
	set, err := kindfile.Extend(kinds.Builtin(), []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	return set
}
