package history

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/versioned"
)

var update = flag.Bool("update", false, "rewrite the current golden file: allowed only if no release has stored its shape; "+
	"otherwise add a file with the next number")

// wireComment and wireFollow have a value in every field.
func wireComment(version int64) event.Child {
	at := event.Time{Time: start.Add(123456 * time.Microsecond)}
	c := event.Child{ID: "0196b2d4-7c00-7000-8000-000000000001", Parent: "42",
		ReplyTo: "0196b2d4-7c00-7000-8000-000000000000", Slug: "abcd2345",
		Path: "0632f8a0000000abcd2344/0632f8a0000001abcd2345", AuthorID: "9007199254740993", Body: "Grüße & <b>tags</b>\n",
		AuthorState:     event.AuthorActive,
		ModerationState: event.ModerationApproved, Version: version, CreatedAt: at, UpdatedAt: at, Actor: "user:7", Reason: "fine"}
	if version == 3 {
		c.Body, c.AuthorState = "", event.AuthorDeleted
	}
	return c
}

func wireFollow(version int64) event.Edge {
	at := event.Time{Time: start.Add(123456 * time.Microsecond)}
	f := event.Edge{From: "7", To: "9007199254740994", Status: event.StatusActive, Version: version, CreatedAt: at, PositionedAt: at,
		UpdatedAt: at, Actor: "user:7"}
	if version == 2 {
		f.Status = event.StatusRemoved
	}
	return f
}

func TestTodaysShapesAreThoseOfTheNewestFiles(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	for v := range int64(3) {
		comment := toEvent(event.AggregateComment, event.Edited, wireComment(v+1))
		comment.AggregateID = "42"
		apply(t, pool, comment, toEvent(event.AggregateFollow, event.Created, wireFollow(v+1)))
	}
	for _, table := range []string{"comment_history", "follow_history"} {
		var got bytes.Buffer
		var row []byte
		if err := pool.QueryRow(t.Context(), `SELECT json_agg(json_build_object('object', object, 'metadata', metadata) ORDER BY version_id)
			FROM `+table).Scan(&row); err != nil {
			t.Fatal(err)
		}
		if err := json.Indent(&got, row, "", "  "); err != nil {
			t.Fatal(err)
		}
		files := shapes(t, table)
		newest := files[len(files)-1]
		if *update {
			if err := os.WriteFile(newest, append(got.Bytes(), '\n'), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		var have, want []map[string]any
		if err := errors.Join(json.Unmarshal(got.Bytes(), &have), json.Unmarshal(read(t, newest), &want)); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, have); diff != "" {
			t.Errorf("%s and %s differ (-want +got); add a file with the next number for a new shape, and keep the old files:\n%s",
				table, newest, diff)
		}
	}
}

// shapes returns the golden files of a table, oldest first.
func shapes(t *testing.T, table string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", table+".v*.json"))
	if err != nil || len(files) < 2 {
		t.Fatalf("files of %s: %v, %v", table, files, err)
	}
	return files
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// put replaces the rows of the table by the rows of a file.
func put(t *testing.T, pool *pgxpool.Pool, table, file string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), `DELETE FROM `+table); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `INSERT INTO `+table+
		` (tenant_id, object, metadata) SELECT 1, r -> 'object', r -> 'metadata' FROM jsonb_array_elements($1::jsonb) r`,
		string(read(t, file))); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func TestEveryShapeEverStoredIsRead(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	ctx := t.Context()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	old := event.Child{ID: "0190a000-0000-7000-8000-0000000000a1", Parent: "42", AuthorID: "7", Body: "first", Version: 1, Actor: "ann",
		CreatedAt: event.Time{Time: at}}
	next := event.Child{ID: old.ID, Parent: "42", AuthorID: "7", Body: "second", Version: 2}
	comments := map[string][]versioned.Version[event.Child]{
		"comment_history.v0.json": {
			{Object: old, Metadata: versioned.Metadata{VersionID: 99999999991, VersionState: versioned.Archived, CreatedBy: "ann",
				LastUpdateTime: at}, Position: 1},
			{Object: next, Metadata: versioned.Metadata{VersionID: 99999999992, VersionState: versioned.Latest, CreatedBy: "leo",
				LastUpdateTime: at.Add(time.Second - time.Hour)}, Position: 2},
		},
		"comment_history.v1.json": versions(versioned.Deleted, wireComment(1), wireComment(2), wireComment(3)),
	}
	follows := map[string][]versioned.Version[event.Edge]{
		"follow_history.v0.json": {
			{Object: event.Edge{From: "7", To: "9007199254740993", Version: 1},
				Metadata: versioned.Metadata{VersionID: 99999999993, VersionState: versioned.Archived, CreatedBy: "ann",
					LastUpdateTime: at}, Position: 1},
			{Object: event.Edge{From: "7", To: "9007199254740993", Status: event.StatusActive, Version: 2},
				Metadata: versioned.Metadata{VersionID: 99999999994, VersionState: versioned.Latest, CreatedBy: "leo",
					LastUpdateTime: at.Add(1500 * time.Millisecond)}, Position: 2},
		},
		"follow_history.v1.json": versions(versioned.Latest, wireFollow(1), wireFollow(2), wireFollow(3)),
	}
	for _, file := range shapes(t, "comment_history") {
		put(t, pool, "comment_history", file)
		want, key := comments[filepath.Base(file)], versioned.Key{wireComment(1).ID}
		if len(want) == 2 {
			key = versioned.Key{old.ID}
		}
		reads(t, ctx, pool, file, Children(commentKind), key, want, func(c event.Child) []versioned.Field {
			return []versioned.Field{{Name: "comment_id", Value: c.ID}}
		})
	}
	for _, file := range shapes(t, "follow_history") {
		put(t, pool, "follow_history", file)
		want := follows[filepath.Base(file)]
		f := want[0].Object
		reads(t, ctx, pool, file, Edges(followKind), versioned.Key{f.From, f.To}, want,
			func(f event.Edge) []versioned.Field {
				return []versioned.Field{{Name: "follower_id", Value: f.From}}
			})
	}
}

// versions returns the versions that the current shapes store; the last one has the state head.
func versions[T any](head versioned.State, objects ...T) (all []versioned.Version[T]) {
	var zero T
	first := int64(100000000001)
	if _, follow := any(zero).(event.Edge); follow {
		first++
	}
	for i, o := range objects {
		state := versioned.Archived
		if i == len(objects)-1 {
			state = head
		}
		all = append(all, versioned.Version[T]{Object: o, Position: int64(i + 1), Metadata: versioned.Metadata{
			VersionID: first + 2*int64(i), VersionState: state, CreatedBy: "user:7", LastUpdateTime: start.Add(123456 * time.Microsecond)}})
	}
	return all
}

// reads reads an object through every function that reads.
func reads[T any](t *testing.T, ctx context.Context, pool *pgxpool.Pool, file string, table *Table[T], key versioned.Key,
	want []versioned.Version[T], fields func(T) []versioned.Field) {
	t.Helper()
	if len(want) == 0 {
		t.Fatalf("the test has no expected versions for %s", file)
	}
	err := postgres.InTx(ctx, pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		history, err := historyOf(table, ctx, tx, 1, key, 0, 10)
		if diff := cmp.Diff(want, history); diff != "" {
			t.Errorf("%s: history (-want +got):\n%s", file, diff)
		}
		recent, rerr := table.Recent(ctx, tx, 1, key, math.MaxInt64, 1)
		head := want[len(want)-1:]
		if diff := cmp.Diff(head, recent); diff != "" {
			t.Errorf("%s: the newest (-want +got):\n%s", file, diff)
		}
		list, lerr := table.versions(table.raw.List(ctx, tx, 1, nil, 10))
		query, qerr := table.Query(ctx, tx, 1, fields(head[0].Object), nil, 10)
		deleted, derr := table.versions(table.raw.ListDeleted(ctx, tx, 1, nil, 10))
		got, gerr := table.raw.Get(ctx, tx, 1, key)
		one, oerr := table.versions([]versioned.Version[json.RawMessage]{got}, gerr)
		if err := errors.Join(err, rerr, lerr, qerr, derr); err != nil {
			return err
		}
		if head[0].Metadata.VersionState == versioned.Deleted {
			if diff := cmp.Diff(head, deleted); diff != "" || len(list)+len(query) > 0 || !errors.Is(gerr, versioned.ErrNotFound) {
				t.Errorf("%s: reads of a deleted object: %v, %v, %v, %s", file, list, query, gerr, diff)
			}
			return nil
		}
		if diff := cmp.Diff([][]versioned.Version[T]{head, head, head}, [][]versioned.Version[T]{list, query, one}); diff != "" ||
			oerr != nil {
			t.Errorf("%s: List, Query and Get (-want +got): %v\n%s", file, gerr, diff)
		}
		return nil
	})
	if err != nil {
		t.Errorf("%s: %v", file, err)
	}
}
