//go:build faults

package migrations_test

import "testing"

func TestNoCallerHijacksAFunctionOfAnotherSchema(t *testing.T) { hijack(t, operators) }
