package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/internal/daemon"
)

// runCeiling serves new follows until ctx ends, with the least work that stores them: no tokens, no
// validation, no answers but 201, and groups that take one round trip. The tables and their row
// security are those of the API, so no API on them can be faster.
func (cfg childConfig) runCeiling(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	l, err := net.Listen("tcp", cfg.API.Addr)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	writes := make(chan leastWrite)
	g, ctx := errgroup.WithContext(ctx)
	for range 2 { // while one group commits, the next one works
		g.Go(func() error {
			for {
				select {
				case first := <-writes:
					storeLeast(ctx, pool, first, writes)
				case <-ctx.Done():
					return nil
				}
			}
		})
	}
	g.Go(func() error {
		return daemon.Serve(ctx, l, leastHandler(writes), cfg.API.AddressConnections, slog.Default())
	})
	return g.Wait()
}

type leastWrite struct {
	follower, followee string
	done               chan<- error
}

func leastHandler(writes chan<- leastWrite) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ids := strings.Split(r.URL.Path, "/") // "", v1, follows, FOLLOWER, FOLLOWEE
		if len(ids) != 5 {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		done := make(chan error, 1)
		select {
		case writes <- leastWrite{ids[3], ids[4], done}:
		case <-r.Context().Done():
			return
		}
		if err := <-done; err != nil {
			slog.Warn("the ceiling's write failed", "error", err)
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusCreated)
	}
}

// storeLeast stores the first write and those that wait, in one transaction and one round trip.
func storeLeast(ctx context.Context, pool *pgxpool.Pool, first leastWrite, writes <-chan leastWrite) {
	const most = 128 // as in package store
	group := []leastWrite{first}
	for waits := true; waits && len(group) < most; {
		select {
		case w := <-writes:
			group = append(group, w)
		default:
			waits = false
		}
	}
	var followers, followees, payloads []string
	for _, w := range group {
		followers, followees = append(followers, w.follower), append(followees, w.followee)
		payloads = append(payloads, `{"follower_id":"`+w.follower+`","followee_id":"`+w.followee+`",`+payloadRest)
	}
	batch := &pgx.Batch{}
	batch.Queue("begin")
	batch.Queue(`SELECT set_config('tidings.tenant', $1::bigint::text, true)`, tenant)
	batch.Queue(`INSERT INTO edges_follow (tenant_id, from_id, to_id) SELECT $1::bigint, from_id, to_id
	  FROM unnest($2::text[], $3::text[]) AS w(from_id, to_id)`, tenant, followers, followees)
	batch.Queue(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
	  SELECT $1::bigint, 'follow', to_id, 'created', payload FROM unnest($2::text[], $3::text[]::jsonb[]) AS w(to_id, payload)`,
		tenant, followees, payloads)
	batch.Queue("commit")
	err := pool.SendBatch(context.WithoutCancel(ctx), batch).Close()
	for _, w := range group {
		w.done <- err
	}
}

// payloadRest has the members of an event's payload that do not differ.
var payloadRest = goPayload[strings.Index(goPayload, `"status"`):]
