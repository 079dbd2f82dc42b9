package consumers

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/broker"
)

// Stranded returns the consumers that cannot continue from their offsets, each with the reason: the
// streams lack their next events, and a repair cannot restore them. A replay rebuilds these
// consumers. The result includes a consumer without any offset if the first streams are gone. On a
// cluster a loss counts only once the brokers have reported it for as long as broker.Doubt
// requires, so Stranded then takes 20 s.
func Stranded(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config,
	names ...string) (stranded map[string]error, err error) {
	_, err = broker.Confirm(ctx, js, func(ctx context.Context) (_ broker.Stream, lost bool, err error) {
		stranded, err = strandedNow(ctx, pool, js, cfg, names)
		return broker.Stream{}, len(stranded) > 0, err
	})
	return stranded, err
}

// strandedNow is Stranded for one answer of each stream's leader.
func strandedNow(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, cfg broker.Config,
	names []string) (map[string]error, error) {
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
			_, ours := cfg.Number(o.Stream) // otherwise it belongs to another cell
			if o.Closed || !ours {
				continue
			}
			if !ok {
				stranded[name] = fmt.Errorf("stream %s is gone, and the consumer's offset is %d", o.Stream, o.Seq)
				continue
			}
			reason, err := lost(ctx, js, o, s)
			switch {
			case err != nil:
				return nil, err
			case reason != nil:
				stranded[name] = reason
			case o.Seq+1 < s.First:
				erased, err := broker.Erased(ctx, js, cfg, s.Name, o.Seq+1, s.First-1)
				if err != nil {
					return nil, err
				}
				if !erased {
					stranded[name] = fmt.Errorf("stream %s begins at %d, and the consumer's offset is %d", s.Name, s.First, o.Seq)
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
					stranded[name] = fmt.Errorf("stream %s, the predecessor of %s, is gone, and the consumer has applied none of it",
						cfg.StreamName(n), s.Name)
				}
			}
		}
	}
	return stranded, nil
}
