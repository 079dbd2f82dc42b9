package store

import (
	"bytes"
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

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/versioned"
)

var update = flag.Bool("update", false, "rewrite the current golden file: allowed only if no release has stored its shape; "+
	"otherwise add a file with the next number")

var goldenTime = time.Date(2026, 1, 2, 3, 4, 5, 123456000, time.UTC)

// goldenThread has a value in every field.
func goldenThread(version int64) event.Thread {
	return event.Thread{PostID: "9007199254740993", Locked: true, Premoderate: true, Title: "Rules & <b>tags</b>", Version: version,
		UpdatedAt: event.Time{Time: goldenTime}, Actor: "user:7"}
}

func threadShapes(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/threads.v*.json")
	if err != nil || len(files) < 2 {
		t.Fatalf("files: %v, %v", files, err)
	}
	return files
}

func TestTodaysShapeOfThreadSettingsIsThatOfTheNewestFile(t *testing.T) {
	t.Parallel()
	pool := testkit.Postgres(t).Pool(t, postgres.RoleSystem)
	var row []byte
	err := postgres.InTx(t.Context(), pool, pgx.TxOptions{}, func(tx pgx.Tx) error {
		for v := range int64(2) {
			if _, err := threads().Upsert(t.Context(), tx, []versioned.Change[event.Thread]{{TenantID: 1, Object: goldenThread(v + 1),
				By: "user:7", At: goldenTime}}); err != nil {
				return err
			}
		}
		return tx.QueryRow(t.Context(), `SELECT json_agg(json_build_object('object', object, 'metadata', metadata) ORDER BY version_id)
			FROM threads`).Scan(&row)
	})
	if err != nil {
		t.Fatal(err)
	}
	files := threadShapes(t)
	newest := files[len(files)-1]
	if *update {
		var b bytes.Buffer
		if err := errors.Join(json.Indent(&b, row, "", "  "), os.WriteFile(newest, append(b.Bytes(), '\n'), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(newest)
	if err != nil {
		t.Fatal(err)
	}
	var have, want []map[string]any
	if err := errors.Join(json.Unmarshal(row, &have), json.Unmarshal(b, &want)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("threads holds what %s does not (-want +got); a new shape takes a file with the next number, and the old files stay:\n%s",
			newest, diff)
	}
}

func TestEveryShapeOfThreadSettingsEverStoredIsReadAndGoesOn(t *testing.T) {
	t.Parallel()
	db := testkit.Postgres(t)
	system, s := db.Pool(t, postgres.RoleSystem), New(db.Pool(t, postgres.RoleAPI), nil)
	// Higher ids than those in the files.
	if _, err := db.Pool(t, postgres.RoleOwner).Exec(t.Context(), `SELECT setval('object_version_id', 100000001000)`); err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	shapes := map[string][]versioned.Version[event.Thread]{
		"threads.v0.json": {
			{Object: event.Thread{PostID: "42", Title: "Rules", Version: 2},
				Metadata: versioned.Metadata{VersionID: 99999999992, VersionState: versioned.Latest, CreatedBy: "leo",
					LastUpdateTime: at.Add(time.Second - time.Hour)}, Position: 99999999992},
			{Object: event.Thread{PostID: "42", Locked: true, Version: 1},
				Metadata: versioned.Metadata{VersionID: 99999999991, VersionState: versioned.Archived, CreatedBy: "ann",
					LastUpdateTime: at}, Position: 99999999991},
		},
		"threads.v1.json": {
			{Object: goldenThread(2), Metadata: versioned.Metadata{VersionID: 100000000002, VersionState: versioned.Latest,
				CreatedBy: "user:7", LastUpdateTime: goldenTime}, Position: 100000000002},
			{Object: goldenThread(1), Metadata: versioned.Metadata{VersionID: 100000000001, VersionState: versioned.Archived,
				CreatedBy: "user:7", LastUpdateTime: goldenTime}, Position: 100000000001},
		},
	}
	for tenant, file := range threadShapes(t) {
		tenant := int64(tenant + 1)
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := system.Exec(t.Context(), `INSERT INTO threads (tenant_id, object, metadata) SELECT $1, r -> 'object', r -> 'metadata'
			FROM jsonb_array_elements($2::jsonb) r`, tenant, string(b)); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		want := shapes[filepath.Base(file)]
		if want == nil {
			t.Fatalf("the test has no content for %s", file)
		}
		post := want[0].Object.PostID
		got, err := s.ThreadVersions(t.Context(), tenant, commentKind, post, math.MaxInt64, 10)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: versions (-want +got): %v\n%s", file, err, diff)
		}
		inForce := want[0].Object
		inForce.Actor = ""
		if now, err := s.GetThread(t.Context(), tenant, commentKind, post); err != nil || now != inForce {
			t.Errorf("%s: present settings %+v, %v: want %+v", file, now, err, inForce)
		}
		out, err := s.SetThreads(t.Context(), tenant, commentKind,
			[]ThreadSettings{{Meta: Meta{Actor: "ann"}, Object: post, IfVersion: &inForce.Version, Title: "Next"}})
		if err != nil || out[0].Err != nil || !out[0].Changed || out[0].Thread.Version != inForce.Version+1 {
			t.Errorf("%s: the next version: %+v, %v", file, out, err)
		}
	}
}
