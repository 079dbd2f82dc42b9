package store_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/store"
)

func (f fixture) retain(t *testing.T, after time.Duration) (done [3]int64) {
	t.Helper()
	if err := store.RetainThreads(t.Context(), f.system, versioned.Terms{After: after, Done: func(expired, purged, versions int64) {
		done[0], done[1], done[2] = done[0]+expired, done[1]+purged, done[2]+versions
	}}); err != nil {
		t.Fatal(err)
	}
	return done
}

func TestRetentionChangesNothingThatHoldsForAThread(t *testing.T) {
	t.Parallel()
	f := open(t)
	set := func(post event.ID, version *int64, locked bool) store.ThreadOutcome {
		t.Helper()
		out, err := f.SetThreads(t.Context(), tenant, commentKind,
			[]store.ThreadSettings{{Meta: meta(), Object: post, IfVersion: version, Locked: locked}})
		if err != nil || out[0].Err != nil {
			t.Fatal(err, out)
		}
		return out[0]
	}
	inForce := func(post event.ID) event.Thread {
		t.Helper()
		got, err := f.GetThread(t.Context(), tenant, commentKind, post)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	set("1", nil, true)
	set("1", nil, false) // the defaults again
	set("2", nil, true)
	before, locked := inForce("1"), inForce("2")
	if done := f.retain(t, 0); done != [3]int64{} {
		t.Errorf("without a setting: %v", done)
	}
	if done := f.retain(t, time.Hour); done != [3]int64{} {
		t.Errorf("touched just now: %v", done)
	}
	long := func() { // since the last write
		if _, err := f.system.Exec(t.Context(), `UPDATE threads SET metadata = jsonb_set(metadata, '{last_update_time}',
			'"2026-01-01T00:00:00.000000Z"')`); err != nil {
			t.Fatal(err)
		}
	}
	long()
	if done := f.retain(t, time.Hour); done != [3]int64{1, 0, 0} {
		t.Errorf("the first step: %v", done)
	}
	if got := inForce("1"); got != before || inForce("2") != locked {
		t.Errorf("deleted logically: %+v, want %+v", got, before)
	}
	versions, err := f.ThreadVersions(t.Context(), tenant, commentKind, "1", math.MaxInt64, 10)
	if err != nil || len(versions) != 3 || versions[0].Metadata.VersionState != versioned.Deleted ||
		versions[0].Metadata.CreatedBy != versioned.RetentionCreator {
		t.Errorf("versions: %+v, %v", versions, err)
	}
	if out := set("1", &before.Version, false); out.Changed {
		t.Errorf("the defaults set once more: %+v", out)
	}
	long()
	if done := f.retain(t, time.Hour); done != [3]int64{0, 1, 3} {
		t.Errorf("the second step: %v", done)
	}
	purged := before
	purged.UpdatedAt = event.Time{}
	if got := inForce("1"); got != purged || inForce("2") != locked {
		t.Errorf("purged: %+v, want %+v", got, purged)
	}
	if got, err := f.GetThread(t.Context(), tenant+1, commentKind, "1"); err != nil || got.Version != 0 {
		t.Errorf("another tenant reads version %d, %v", got.Version, err)
	}
	// The next write continues from the version that consumers know.
	if out := set("1", &before.Version, true); !out.Changed || out.Thread.Version != before.Version+1 {
		t.Errorf("set again: %+v", out)
	}
	var got []string
	for _, e := range f.events(t) {
		got = append(got, fmt.Sprint(e.AggregateID, " ", e.Payload["version"], " ", e.Payload["locked"]))
	}
	if diff := cmp.Diff([]string{"1 1 true", "1 2 false", "2 1 true", "1 3 true"}, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}

func TestAThreadThatIsSetWhileRetentionTakesItIsSet(t *testing.T) {
	t.Parallel()
	f := open(t)
	if _, err := f.system.Exec(t.Context(), `INSERT INTO threads (tenant_id, object, metadata)
	  SELECT $1, jsonb_build_object('post_id', p::text, 'version', 1, 'updated_at', '2026-01-01T00:00:00.000000Z'),
	         jsonb_build_object('version_id', p, 'version_state', 'LATEST', 'created_by', 'x', 'last_update_time',
	         '2026-01-01T00:00:00.000000Z') FROM generate_series(1, 60) p`, tenant); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	retaining := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if err := store.RetainThreads(t.Context(), f.system, versioned.Terms{After: time.Microsecond}); err != nil {
				retaining <- err
				return
			}
		}
		retaining <- nil
	}()
	for p := range int64(60) {
		for _, title := range []string{"a", "b"} {
			out, err := f.SetThreads(t.Context(), tenant, commentKind, []store.ThreadSettings{{Meta: meta(),
				Object: event.IDOf(p + 1), Title: title}})
			if err != nil || !out[0].Changed {
				t.Fatalf("post %d: %+v, %v", p+1, out, err)
			}
		}
	}
	stop()
	if err := <-retaining; err != nil {
		t.Fatal(err)
	}
	for p := range int64(60) {
		if got, err := f.GetThread(t.Context(), tenant, commentKind, event.IDOf(p+1)); err != nil || got.Title != "b" || got.Version != 3 {
			t.Errorf("post %d: %+v, %v", p+1, got, err)
		}
	}
	if n, err := store.CheckThreads(t.Context(), f.system, func(f versioned.Flaw[event.Thread]) {
		b, err := json.Marshal(f)
		t.Errorf("%s %v", b, err)
	}); err != nil || n < 120 {
		t.Errorf("%d versions, %v", n, err)
	}
}
