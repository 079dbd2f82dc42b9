package coldstore

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestARowIsFoundInItsExport(t *testing.T) {
	r := newRig(t, 30) // in segments of 7
	e := r.export()
	want := r.table()
	r.drop()
	for _, id := range []int64{1, 7, 8, 29, 30} {
		var event string
		for _, row := range want {
			if strings.HasPrefix(row, fmt.Sprintf("(%d,", id)) {
				event = row
			}
		}
		p, err := r.Find(t.Context(), part.From, id, "")
		if err != nil || p == nil || p.Export.ID != e.ID || p.Segment != fmt.Sprintf("%05d.ndjson.gz", (id-1)/7+1) || p.Row.ID != id ||
			!strings.Contains(event, p.Row.EventID) {
			t.Fatalf("%d: %+v, %v", id, p, err)
		}
		if again, err := r.Find(t.Context(), part.From, id, p.Row.EventID); err != nil || again == nil {
			t.Errorf("%d by its event: %+v, %v", id, again, err)
		}
		if other, err := r.Find(t.Context(), part.From, id, "00000000-0000-4000-8000-000000000000"); err != nil || other != nil {
			t.Errorf("%d by another event: %+v, %v", id, other, err)
		}
	}
	if p, err := r.Find(t.Context(), part.From, 31, ""); err != nil || p != nil {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := r.Find(t.Context(), other.From, 100001, ""); err != nil || p != nil {
		t.Errorf("of a range without an export: %+v, %v", p, err)
	}
	if err := os.Remove(filepath.Join(r.dir, e.dir(), "00002.ndjson.gz")); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Find(t.Context(), part.From, 8, ""); err == nil {
		t.Error("a missing segment returned no error")
	}
}
