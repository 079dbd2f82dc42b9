package cli

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAFileOfSpansIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "spans")
	f, err := openSpans(path)
	if err != nil {
		t.Fatal(err)
	}
	f.most = 100
	for range 12 { // 10 bytes each: a write after the tenth starts another file
		if _, err := f.Write([]byte("123456789\n")); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{path: 20, path + ".1": 100} {
		if b, err := os.ReadFile(name); err != nil || len(b) != want {
			t.Errorf("%s has %d bytes, want %d: %v", name, len(b), want, err)
		}
	}
}
