//go:build race

package fleet_test

func init() { race = true }
