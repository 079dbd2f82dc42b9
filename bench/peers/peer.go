package main

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"
)

// peer is one way from PostgreSQL to JetStream.
type peer struct {
	name     string
	modules  []string // of its libraries
	stream   string   // the name of its stream
	declares bool     // its relay creates the stream; otherwise the harness does

	// prepare creates the tables of the outbox.
	prepare func(ctx context.Context, pool *pgxpool.Pool, url string) error
	// append writes events in the caller's transaction. The end of the run calls close.
	append func(pool *pgxpool.Pool) (fn func(ctx context.Context, tx pgx.Tx, events []event) error, err error)
	// unpublished selects the payloads of the events that wait, have failed or were set aside.
	unpublished string
	held        string                       // selects those that a relay has claimed; "" if no table or lock shows that
	payload     func([]byte) ([]byte, error) // unwraps a result of these; nil for the payload itself
	// relay runs in a child process until ctx ends; nil for a binary of its own.
	relay func(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, natsURL string) error
}

var peers = []peer{naive, watermillPeer, riverPeer, tidings}

// versions returns the libraries that this program was built with, and their versions.
func (p peer) versions() (all []string) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	for _, d := range info.Deps {
		if slices.Contains(p.modules, d.Path) {
			all = append(all, d.Path+" "+d.Version)
		}
	}
	return all
}

func peerNamed(name string) (peer, error) {
	for _, p := range peers {
		if p.name == name {
			return p, nil
		}
	}
	return peer{}, fmt.Errorf("no peer %q", name)
}

// The stream of the peers whose relay creates none, and its only subject.
const (
	peerStream  = "BENCH"
	peerSubject = "bench.events"
)

// event is what an outbox gets.
type event struct {
	change
	Pad string `json:"pad"`
}

func (e event) json() []byte {
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // only a programming error: strings and a number
	}
	return b
}

// waiting returns the events that the peer's outbox has as unpublished.
func (p peer) waiting(ctx context.Context, pool *pgxpool.Pool) (map[change]bool, error) {
	return p.changes(ctx, pool, p.unpublished)
}

// changes returns the events that a statement selects in the outbox.
func (p peer) changes(ctx context.Context, pool *pgxpool.Pool, sql string) (map[change]bool, error) {
	rows, _ := pool.Query(ctx, sql)
	all, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return nil, fmt.Errorf("read the outbox: %w", err)
	}
	m := make(map[change]bool, len(all))
	for _, b := range all {
		if p.payload != nil {
			if b, err = p.payload(b); err != nil {
				return nil, err
			}
		}
		var c change
		if err := json.Unmarshal(b, &c); err != nil {
			return nil, fmt.Errorf("decode a row of the outbox: %w", err)
		}
		m[c] = true
	}
	return m, nil
}
