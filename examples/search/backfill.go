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
	"github.com/tidings/tidings/subscribe"
)

// line is one of an export's answer: first where it is, then states, and how the answer ends.
type line struct {
	Export struct {
		Tenant  event.ID
		Cursor  string
		Streams []subscribe.Position
	}
	After         string
	Data, Problem json.RawMessage
	End           string
}

// backfill fills an index that is new from an export, because the streams may not have the oldest comments any more. The index then continues where the export ends.
func backfill(ctx context.Context, pool *pgxpool.Pool, api, token string) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return subscribe.Begin(ctx, tx, name) }) // changes nothing
	if errors.Is(err, subscribe.ErrBegun) {
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

// load writes the states of one answer, and sets at to where the next one goes on. With the last answer the index begins.
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
	for l = (line{}); lines.Decode(&l) == nil && l.End == ""; l = (line{}) { // an answer that breaks off goes on as one that ends
		k, _ := kinds.Builtin().Child(event.AggregateComment)
		c, err := k.Names().Parse(l.Data)
		if err != nil {
			return false, err
		}
		document(&q, int64(head.Export.Tenant), c)
		at.Set("after", l.After)
	}
	if l.End == "problem" {
		return false, fmt.Errorf("export: %s", l.Problem)
	}
	if err := tx.SendBatch(ctx, &q).Close(); err != nil || l.End != "done" {
		return false, err
	}
	return true, subscribe.Begin(ctx, tx, name, head.Export.Streams)
}
