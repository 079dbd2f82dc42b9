//go:build race

package deploy_test

func init() { race = true }
