package coldstore

import (
	"bytes"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/minio/minio-go/v7"
)

const theSecret = "secret 1 " // of tenant 7, author 1

// onlyComplete fails if the bucket has an object or an upload of another export than the complete
// ones, or the secret.
func (r *rig) onlyComplete(t *testing.T, backend *s3mem.Backend, when string) {
	t.Helper()
	complete := r.complete()
	for _, key := range append(objects(t, backend), r.uploading(t)...) {
		if !slices.ContainsFunc(complete, func(id string) bool { return strings.Contains(key, "/"+id+"/") }) {
			t.Errorf("%s the store has %s", when, key)
		}
	}
	if strings.Contains(read(t, t.Context(), r), theSecret) {
		t.Errorf("%s the store has the secret", when)
	}
}

// uploading returns the keys of the uploads that have begun and not ended.
func (r *rig) uploading(t *testing.T) (keys []string) {
	t.Helper()
	b, err := r.open(r.url)
	if err != nil {
		t.Fatal(err)
	}
	at := b.place.(*s3)
	for u := range at.client.ListIncompleteUploads(t.Context(), at.bucket, "", true) {
		if u.Err != nil {
			t.Fatal(u.Err)
		}
		keys = append(keys, u.Key)
	}
	return keys
}

// redacted redacts until nothing is left, as an erasure does, and returns the last scan.
func (r *rig) redacted(t *testing.T) Redacted {
	t.Helper()
	r.exec(eraseSQL)
	for range 3 {
		if _, err := r.Redact(t.Context(), 7, "1", erase); err != nil {
			t.Fatal(err)
		}
	}
	got, err := r.PreviewRedaction(t.Context(), 7, "1", erase)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// TestWhatAThawedExporterLeftIsFoundAndSwept: the exporter writes an object and a part of another,
// and is killed. The next erasure does not end before they are gone, and the archiver removes them
// by itself.
func TestWhatAThawedExporterLeftIsFoundAndSwept(t *testing.T) {
	r := newRig(t, 30)
	backend := r.s3(func(http.ResponseWriter, *http.Request) bool { return false })
	dead := r.export()
	r.redacted(t)
	r.exec(`UPDATE outbox_archive_exports SET over_at = over_at - interval '2 days' WHERE state = 'OVER'`)
	if _, err := r.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.onlyComplete(t, backend, "after a redaction")
	b, err := r.open(r.url)
	if err != nil {
		t.Fatal(err)
	}
	late := func(dir string) {
		t.Helper()
		at := b.place.(*s3)
		if err := b.put(t.Context(), dir+"/00001.ndjson", "", []byte(theSecret)); err != nil {
			t.Fatal(err)
		}
		core, key := minio.Core{Client: at.client}, at.prefix+dir+"/00002.ndjson"
		id, err := core.NewMultipartUpload(t.Context(), at.bucket, key, minio.PutObjectOptions{})
		if err == nil {
			_, err = core.PutObjectPart(t.Context(), at.bucket, key, id, 1, bytes.NewReader([]byte(theSecret)), int64(len(theSecret)),
				minio.PutObjectPartOptions{})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	look := func() Redacted {
		t.Helper()
		got, err := r.PreviewRedaction(t.Context(), 7, "1", erase)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	late(dead.dir())
	if got := look(); got.Remains != 1 {
		t.Errorf("the scan finds %+v, want the remains of one export", got)
	}
	if _, err := r.Redact(t.Context(), 7, "1", erase); err != nil {
		t.Fatal(err)
	}
	if got := look(); got.Remains != 0 || len(got.Unread) > 0 {
		t.Errorf("after another redaction the scan finds %+v", got)
	}
	r.onlyComplete(t, backend, "after another redaction")

	r.exec(`UPDATE outbox_archive_exports SET over_at = now() WHERE state = 'OVER'`)
	late(dead.dir())
	if _, err := r.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.onlyComplete(t, backend, "after a sweep")

	// Only a person knows whose files these are.
	r.exec(`DELETE FROM outbox_archive_exports WHERE export_id = $1`, dead.ID)
	late(dead.dir())
	if _, err := r.Redact(t.Context(), 7, "1", erase); err != nil {
		t.Fatal(err)
	}
	if got := look(); len(got.Unread) != 1 || !strings.Contains(got.Unread[0], dead.dir()) {
		t.Errorf("the scan finds %+v, want the unknown directory %s", got, dead.dir())
	}
	if _, err := b.remove(t.Context(), dead.dir()); err != nil {
		t.Fatal(err)
	}
	r.onlyComplete(t, backend, "after its removal")
}

// TestAnExportWhoseAnswerWasLostKeepsItsFiles: the commit that completed it reached the database.
func TestAnExportWhoseAnswerWasLostKeepsItsFiles(t *testing.T) {
	r := newRig(t, 10)
	r.s3(func(http.ResponseWriter, *http.Request) bool { return false })
	e := r.export()
	b, err := r.open(r.url)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.discard(t.Context(), b, e); err != nil {
		t.Fatal(err)
	}
	r.check(true, "")
	r.exec(`UPDATE outbox_archive_exports SET state = 'WRITING'`)
	other, err := r.begin(t.Context(), 100000, august, r.url)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.discard(t.Context(), b, e); err != nil {
		t.Fatal(err)
	}
	var writing string
	if err := r.pool.QueryRow(t.Context(), `SELECT string_agg(export_id::text, ' ') FROM outbox_archive_exports
		WHERE state = 'WRITING'`).Scan(&writing); err != nil || writing != other.ID {
		t.Errorf("the exports that continue are %q, %v, want %s", writing, err, other.ID)
	}
	if keys, err := b.list(t.Context(), ""); err != nil || len(keys) > 0 {
		t.Errorf("left are %v, %v", keys, err)
	}
}
