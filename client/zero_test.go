package client_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/tidings/tidings/client"
)

func TestAZeroClientSaysSo(t *testing.T) {
	ctx := t.Context()
	var c client.Client
	c.Close()
	for name, call := range map[string]func() error{
		"an edge":     func() error { _, err := c.Follows.Put(ctx, "7", "42"); return err },
		"a child":     func() error { _, err := c.Comments.Get(ctx, "x"); return err },
		"a deletion":  func() error { return c.Comments.Delete(ctx, client.Comment{}) },
		"counts":      func() error { _, err := c.Users.Counts(ctx, "7"); return err },
		"mutuals":     func() error { _, err := c.Users.Mutuals(ctx, "7", "42"); return err },
		"a list":      func() error { _, err := c.Follows.Followers("42").First(ctx); return err },
		"dead":        func() error { _, err := c.DLQ.Get(ctx, 1); return err },
		"named edges": func() error { _, err := c.Edges("visit").Put(ctx, "7", "5"); return err },
		"named child": func() error { _, err := client.ChildrenOf[map[string]any](&c, "tip").Get(ctx, "x"); return err },
		"an object":   func() error { _, err := c.Objects("place").Counts(ctx, "5"); return err },
		"kinds":       func() error { _, err := c.Kinds(ctx); return err },
		"a removal":   func() error { _, err := c.EdgeRemoval(ctx, "x"); return err },
		"a call":      func() error { return c.Call(ctx, "GET", "/v1/kinds", nil, nil) },
		"a session":   func() error { _, err := c.Session("a").Follows.Get(ctx, "7", "42"); return err },
		"an export": func() (last error) {
			for _, last = range c.Follows.Export().All(ctx) {
			}
			return last
		},
		"settings": func() (last error) {
			for _, last = range c.ExportSettings().All(ctx) {
			}
			return last
		},
		"a batch": func() (last error) {
			ops := slices.Values([]client.Operation[client.Follow]{c.Follows.PutOp("7", "42")})
			for _, last = range c.Follows.Batch(ctx, ops) {
			}
			return last
		},
	} {
		if err := call(); !errors.Is(err, client.ErrNoClient) {
			t.Errorf("%s: %v, want %v", name, err, client.ErrNoClient)
		}
	}
}
