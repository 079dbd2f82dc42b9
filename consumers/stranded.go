package consumers

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
)

// Stranded returns the consumers that cannot read on from where they are, each with the reason: the streams lack what is next, and a repair does not bring it. Replay builds
// them anew. A consumer that has begun nowhere, although the first streams are gone, is among them.
func Stranded(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config, names ...string) (map[string]error, error) {
	all, err := readOffsets(ctx, pool, names...)
	if err != nil {
		return nil, err
	}
	streams, err := broker.Streams(ctx, js, cfg)
	if err != nil {
		return nil, err
	}
	there := make(map[string]broker.Stream, len(streams))
	for _, s := range streams {
		there[s.Name] = s
	}
	stranded := make(map[string]error)
	for _, name := range names {
		for _, o := range all[name] {
			s, ok := there[o.Stream]
			_, ours := cfg.Number(o.Stream) // else it is another cell's
			switch {
			case o.Closed, !ours:
			case !ok:
				stranded[name] = fmt.Errorf("stream %s is gone, and its offset is %d", o.Stream, o.Seq)
			case lost(o, s) != nil:
				stranded[name] = lost(o, s)
			case o.Seq+1 < s.First:
				erased, err := broker.Erased(ctx, js, cfg, s.Name, o.Seq+1, s.First-1)
				if err != nil {
					return nil, err
				}
				if !erased {
					stranded[name] = fmt.Errorf("stream %s begins at %d, and its offset is %d", s.Name, s.First, o.Seq)
				}
			}
		}
		for _, s := range streams {
			if _, begun := all[name][s.Name]; begun {
				continue
			}
			for _, n := range s.After {
				_, read := all[name][cfg.StreamName(n)]
				if _, ok := there[cfg.StreamName(n)]; !ok && !read {
					stranded[name] = fmt.Errorf("stream %s came before %s and is gone, and nothing of it is applied", cfg.StreamName(n), s.Name)
				}
			}
		}
	}
	return stranded, nil
}
