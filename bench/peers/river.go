package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// riverPeer is River 0.51.2, under the Mozilla Public License 2.0: one job per event. It follows
// https://github.com/riverqueue/river#readme, where a client works "one queue ("default") with up
// to 100 worker goroutines at a time" and InsertTx inserts a job "on a transaction".
//
// About order River promises nothing here, and says so: "Under most circumstances, developers want
// a job queue to process their jobs in parallel as quickly as possible"
// (https://riverqueue.com/blog/river-pro-sequences). "River Pro sequences guarantee that a specific
// series of jobs will be executed in a one-at-a-time sequential order"
// (https://riverqueue.com/docs/pro/sequences). River Pro is sold, and not measured here.
//
// Four settings differ from the defaults, in River's favor. It fetches jobs every 10 ms instead of
// every 100 ms, and polls every 100 ms instead of every second. A job may take 5 s instead of a
// minute, and counts as lost with its worker after 6 s instead of an hour. The job's id is its
// Nats-Msg-Id.
var riverPeer = peer{
	name: "river", modules: []string{"github.com/riverqueue/river"}, stream: peerStream,
	prepare: func(ctx context.Context, pool *pgxpool.Pool, _ string) error {
		m, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: slog.Default()})
		if err != nil {
			return err
		}
		_, err = m.Migrate(ctx, rivermigrate.DirectionUp, nil)
		return err
	},
	append: func(pool *pgxpool.Pool) (func(context.Context, pgx.Tx, []event) error, error) {
		client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: slog.Default()}) // inserts only
		if err != nil {
			return nil, err
		}
		return func(ctx context.Context, tx pgx.Tx, events []event) error {
			if len(events) == 1 {
				_, err := client.InsertTx(ctx, tx, publishArgs{events[0]}, nil)
				return err
			}
			params := make([]river.InsertManyParams, len(events))
			for i, e := range events {
				params[i].Args = publishArgs{e}
			}
			_, err := client.InsertManyFastTx(ctx, tx, params)
			return err
		}, nil
	},
	unpublished: `SELECT convert_to(args::text, 'UTF8') FROM river_job WHERE state <> 'completed'`,
	held:        `SELECT convert_to(args::text, 'UTF8') FROM river_job WHERE state = 'running'`,
	relay: func(ctx context.Context, pool *pgxpool.Pool, js jetstream.JetStream, _ string) error {
		workers := river.NewWorkers()
		river.AddWorker(workers, &publishWorker{js: js})
		client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
			Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 100}},
			Workers:       workers,
			FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 100 * time.Millisecond,
			JobTimeout: 5 * time.Second, RescueStuckJobsAfter: 6 * time.Second,
			Logger: slog.Default(),
		})
		if err != nil {
			return err
		}
		if err := client.Start(ctx); err != nil {
			return err
		}
		<-client.Stopped()
		return nil
	},
}

// publishArgs is a job that publishes one event.
type publishArgs struct{ event }

// Kind implements river.JobArgs.
func (publishArgs) Kind() string { return "publish" }

type publishWorker struct {
	river.WorkerDefaults[publishArgs]
	js jetstream.JetStream
}

// Work implements river.Worker.
func (w *publishWorker) Work(ctx context.Context, job *river.Job[publishArgs]) error {
	data, err := json.Marshal(job.Args)
	if err != nil {
		return err
	}
	id, err := json.Marshal(job.ID)
	if err != nil {
		return err
	}
	_, err = w.js.PublishMsg(ctx, &nats.Msg{Subject: peerSubject, Data: data, Header: nats.Header{nats.MsgIdHdr: {string(id)}}})
	return err
}
