//go:build faults

package cli

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"encoding/json"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/ops/load"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/ops/verify"
)

// TestPartitionsAreResizedWhileEverythingRuns resizes with two processes, each with all parts, and
// a continuous load.
func TestPartitionsAreResizedWhileEverythingRuns(t *testing.T) {
	d := newDev(t)
	d.start(t)
	in := d.instance(t)
	second := newDev(t, "DATABASE_URL="+in.DatabaseURL, "NATS_URL="+in.NATSURL, "DEV_TOKEN="+in.Token)
	second.start(t)

	spec := followGraph(200, 4000, rand.Uint64())
	t.Logf("seed %d", spec.Seed)
	// The load continues while each resize begins.
	g, l := d.startGate(t, 3*spec.Edges/4, load.Config{Concurrency: 8, RetryFor: startWithin})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	loaded := make(chan error, 1)
	go func() { loaded <- l.Run(ctx, followKind, sequence(spec)) }()
	for i, to := range []int{4, 2} {
		testkit.Eventually(t, "a quarter more is loaded",
			func() (bool, error) { return l.Stats().Done() >= spec.Edges/4*int64(i+1), nil })
		if i == 1 {
			g.raise(spec.Edges)
		}
		code, stdout, stderr := run(t, nil, "", "partitions", "resize", "--to", fmt.Sprint(to), "--wait", arriveWithin.String(), "--yes",
			"--data", d.dir)
		if code != exitOK || !strings.Contains(stdout, "takes slots 0-") || !strings.Contains(stdout, " are open.") {
			t.Fatalf("resize to %d: exit code %d\n%s\n%s", to, code, stdout, stderr)
		}
	}
	if err := <-loaded; err != nil {
		t.Fatal(err)
	}
	d.verify(t)
	d.checkCounts(t, spec)
	d.checkStream(t, spec.Edges)

	var open, all []int
	var listed []status.Partition
	testkit.Eventually(t, "each open partition to have a relay", func() (bool, error) { // one relay may hand it to the other
		listed = d.listed(t)
		return !slices.ContainsFunc(listed, func(p status.Partition) bool { return p.Relay == "" }), nil
	})
	for _, p := range listed {
		open = append(open, p.Partition)
		if p.State != status.Open || p.LastSlot-p.FirstSlot != 15 {
			t.Errorf("partition %+v", p)
		}
	}
	for _, p := range d.listed(t, "--all") {
		all = append(all, p.Partition)
	}
	if !slices.Equal(open, []int{5, 6}) || !slices.Equal(all, []int{0, 1, 2, 3, 4, 5, 6}) {
		t.Errorf("the partitions %v of %v are open, want 5 and 6 of 7", open, all)
	}
	if code, stdout, stderr := run(t, nil, "", "partitions", "resize", "--to", "2", "--data", d.dir); code != exitOK ||
		stdout != "There are 2 partitions already. Nothing was changed.\n" {
		t.Errorf("resize to as many: exit code %d\n%s\n%s", code, stdout, stderr)
	}
	second.stop(t)
	if status, _ := d.request(t, http.MethodPut, "/v1/follows/900/901", "", nil, nil); status != http.StatusCreated {
		t.Errorf("follow: status %d", status)
	}
	d.verify(t)
}

func TestVerifyTellsMessagesThatAreNoEventsFromEventsThatAreMissing(t *testing.T) {
	t.Parallel()
	d := newDev(t)
	d.start(t)
	for n := range 3 {
		if status, _ := d.request(t, http.MethodPut, fmt.Sprintf("/v1/follows/1/%d", n+2), "", nil, nil); status != http.StatusCreated {
			t.Fatalf("follow: status %d", status)
		}
	}
	d.verify(t)
	nc, err := nats.Connect(d.instance(t).NATSURL, nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(t.Context(), "EVENTS-0")
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.GetMsg(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	again := first.Header
	for name := range again { // the second list does not repeat the relay's own conditions
		if strings.HasPrefix(name, "Nats-") {
			again.Del(name)
		}
	}
	if _, err := js.Publish(t.Context(), first.Subject, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := js.PublishMsg(t.Context(), &nats.Msg{Subject: first.Subject, Header: again, Data: first.Data}); err != nil {
		t.Fatal(err)
	}
	verified := func(want verify.Stream, wantCode int) {
		t.Helper()
		code, stdout, stderr := run(t, nil, "", "verify", "--data", d.dir, "--json", "--wait",
			arriveWithin.String())
		var v verify.Report
		if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != wantCode || len(v.Streams) != 1 || v.Streams[0] != want {
			t.Errorf("verify: exit code %d, %v\n%s\n%s\nwant %+v", code, err, stdout, stderr, want)
		}
	}
	verified(verify.Stream{Stream: "EVENTS-0", Messages: 5, Published: 3, Distinct: 3, Foreign: 1, Repeated: 1}, exitOK)
	if err := stream.DeleteMsg(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	verified(verify.Stream{Stream: "EVENTS-0", Messages: 4, Published: 3, Distinct: 3, Foreign: 1, Repeated: 1, Missing: 1}, exitError)
}

// TestStatusSaysWhyTheRelayPublishesNothing fills the stream, and then takes the database back:
// status, doctor and verify give the cause, although the relay runs.
func TestStatusSaysWhyTheRelayPublishesNothing(t *testing.T) {
	t.Parallel()
	d := newDev(t, "NATS_MAX_BYTES=100")
	d.start(t)
	followed := 1
	follow := func() {
		t.Helper()
		followed++
		path := fmt.Sprintf("/v1/follows/1/%d", followed)
		if status, _ := d.request(t, http.MethodPut, path, "", nil, nil); status != http.StatusCreated {
			t.Fatalf("follow: status %d", status)
		}
	}
	for range 4 {
		follow()
	}
	nc, err := nats.Connect(d.instance(t).NATSURL, nats.Timeout(arriveWithin))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	var stream jetstream.Stream
	testkit.Eventually(t, "the relay to create the stream", func() (bool, error) {
		stream, err = js.Stream(t.Context(), "EVENTS-0")
		return err == nil, err
	})
	code, stdout := 0, ""
	says := func(when string, want, not string, args ...string) {
		t.Helper()
		defer func() {
			if t.Failed() {
				t.Log(stdout)
			}
		}()
		testkit.Eventually(t, when+": "+strings.Join(args, " ")+" to say "+want, func() (bool, error) {
			code, stdout, _ = run(t, nil, "", append(args, "--data", d.dir)...)
			return strings.Contains(stdout, want) && (not == "" || !strings.Contains(stdout, not)), nil
		})
	}
	says("full", "Relays cannot publish to partition 0: ", "No running relay", "status")
	says("full", "NATS has no room", "no running process holds partition 0", "doctor")
	cfg := stream.CachedInfo().Config
	cfg.MaxBytes = -1
	if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	d.verify(t)
	says("with room again", "PARTITION", "Relays cannot publish", "status")

	system, err := postgres.Open(t.Context(), d.instance(t).DatabaseURL, postgres.Config{MaxConns: 2, ConnectTimeout: time.Minute},
		postgres.RoleSystem, "test")
	if err != nil {
		t.Fatal(err)
	}
	defer system.Close()
	if err := pgx.BeginFunc(t.Context(), system, func(tx pgx.Tx) error { // the last write is lost, and the mark of the one before it
		for _, sql := range []string{`UPDATE outbox_partitions SET tail_seq = tail_seq - 2, floor_id = 0`,
			`DELETE FROM outbox_messages WHERE stream_seq = 4`,
			`UPDATE outbox_messages SET processed_at = NULL, stream_seq = NULL, partition = NULL WHERE stream_seq = 3`} {
			if tag, err := tx.Exec(t.Context(), sql); err != nil || tag.RowsAffected() != 1 {
				return fmt.Errorf("%s: %d rows, %w", sql, tag.RowsAffected(), err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	says("after the database went back", "REFUSED", "", "status")
	says("after the database went back", "this database went back in time; run `tidings restore`", "", "status")
	if code != exitAgain {
		t.Errorf("status of a refused stream: exit code %d", code)
	}
	says("after the database went back", "this database went back in time; run `tidings restore`", "", "doctor")
	var stderr string
	code, stdout, stderr = run(t, nil, "", "verify", "--data", d.dir, "--json", "--wait", "0s")
	var v verify.Report
	want := verify.Stream{Stream: "EVENTS-0", Messages: 4, Published: 2, Distinct: 2, Unmarked: 1, Unknown: 1}
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != exitError || len(v.Streams) != 1 || v.Streams[0] != want {
		t.Errorf("verify: exit code %d, %v\n%s\n%s\nwant %+v", code, err, stdout, stderr, want)
	}
}
