package store_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/store"
)

// BenchmarkWrites measures single writes, one at a time and by 16 clients. "again" repeats a create
// and changes nothing. The test servers do not sync to disk, so it measures round trips and
// statements.
func BenchmarkWrites(b *testing.B) {
	s := store.New(testkit.Postgres(b).Pool(b, postgres.RoleAPI), nil)
	ctx := context.Background()
	var n atomic.Int64
	for name, write := range map[string]func(i event.ID) error{
		"follow": func(i event.ID) error {
			out, err := s.PutEdges(ctx, tenant, follows, []store.EdgeWrite{{Meta: meta(), From: i, To: event.IDOf(1 << 40)}})
			if err == nil && !out[0].Changed {
				err = fmt.Errorf("%+v", out[0])
			}
			return err
		},
		"create": func(i event.ID) error {
			out, err := s.CreateChildren(ctx, tenant, commentKind,
				[]store.NewChild{{Meta: meta(), Object: event.IDOf(1 + testkit.Number(i)%1000), AuthorID: i, Body: "a comment",
					Key: string(i)}})
			if err == nil && !out[0].Changed {
				err = fmt.Errorf("%+v", out[0])
			}
			return err
		},
		"again": func(event.ID) error {
			out, err := s.CreateChildren(ctx, tenant, commentKind,
				[]store.NewChild{{Meta: meta(), Object: "1", AuthorID: event.IDOf(1 << 40), Body: "a comment", Key: "again"}})
			if err == nil && out[0].Err != nil {
				err = out[0].Err
			}
			return err
		},
	} {
		b.Run(name+"/1", func(b *testing.B) {
			for b.Loop() {
				if err := write(event.IDOf(n.Add(1))); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/16", func(b *testing.B) {
			b.SetParallelism(8) // times GOMAXPROCS
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := write(event.IDOf(n.Add(1))); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
