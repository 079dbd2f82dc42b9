package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/subscribe/projector"
)

// line is one line of an export's answer: the head, a state, or the end.
type line struct {
	Export struct {
		Tenant  int64 `json:",string"`
		Cursor  string
		Streams []projector.Position
	}
	After         string
	Data, Problem json.RawMessage
	End           string
}

// backfill fills a new index from an export, because the streams may no longer have the oldest
// comments. The index then continues where the export ends.
func backfill(ctx context.Context, pool *pgxpool.Pool, api, token string) error {
	// Without positions Begin changes nothing: it only fails if the index has begun.
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return projector.Begin(ctx, tx, name) })
	if errors.Is(err, projector.ErrBegun) {
		return nil
	}
	for at := (url.Values{}); err == nil; {
		var done bool
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			done, err = load(ctx, tx, api+"/v1/comments:export?"+at.Encode(), token, at)
			return err
		})
		if done && err == nil {
			return nil
		}
	}
	return err
}

// load writes the states of one answer, and sets at to the beginning of the next answer. The index
// begins with the last answer.
func load(ctx context.Context, tx pgx.Tx, from, token string, at url.Values) (done bool, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return false, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return false, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return false, fmt.Errorf("export: %s", answer.Status) // 410: begin again
	}
	var head, l line
	var q pgx.Batch
	lines := json.NewDecoder(answer.Body)
	if err := lines.Decode(&head); err != nil {
		return false, err
	}
	at.Set("cursor", head.Export.Cursor)
	// The next answer continues after the last complete line, even if this one broke off.
	for l = (line{}); lines.Decode(&l) == nil && l.End == ""; l = (line{}) {
		k, _ := kinds.Builtin().Child(event.AggregateComment)
		c, err := k.Names().Parse(l.Data)
		if err != nil {
			return false, err
		}
		document(&q, head.Export.Tenant, c)
		at.Set("after", l.After)
	}
	if l.End == "problem" {
		return false, fmt.Errorf("export: %s", l.Problem)
	}
	if err := tx.SendBatch(ctx, &q).Close(); err != nil || l.End != "done" {
		return false, err
	}
	return true, projector.Begin(ctx, tx, name, head.Export.Streams)
}
