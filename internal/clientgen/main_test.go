package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/tidings/tidings/kinds"
)

// TestTheClientIsOfTheBuiltInKinds compares the client's generated file with what the generator
// writes now.
func TestTheClientIsOfTheBuiltInKinds(t *testing.T) {
	want, err := generate(kinds.Builtin())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile("../../client/builtin.go"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("client/builtin.go is not what the built-in kinds make (%v): run go generate ./client", err)
	}
}
