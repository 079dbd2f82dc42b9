//go:build faults

package coldstore

import (
	"context"
	"net/http"
	"sync/atomic"
	"testing"
)

// TestAThawedExporterBringsNothingBack freezes an exporter at each of its requests. A person is
// erased, and the last scan finds nothing. Then the exporter thaws: the frozen request arrives, and
// the exporter continues as if nothing had happened.
func TestAThawedExporterBringsNothingBack(t *testing.T) {
	for step := int64(1); ; step++ {
		r := newRig(t, 30)
		var n, freezing atomic.Int64
		frozen, thaw := make(chan struct{}), make(chan struct{})
		backend := r.s3(func(http.ResponseWriter, *http.Request) bool {
			if n.Add(1) == freezing.Load() {
				close(frozen)
				<-thaw
			}
			return false
		})
		r.export() // an earlier one, which the erasure redacts
		n.Store(0)
		freezing.Store(step)
		exporter, ended := New(r.pool, r.url, noFence, nil, nil), make(chan error, 1)
		exporter.segmentRows = r.segmentRows
		go func() {
			_, err := exporter.Export(context.WithoutCancel(t.Context()), part)
			ended <- err
		}()
		select {
		case err := <-ended: // it makes fewer requests
			if err != nil || step < 12 {
				t.Errorf("an export of %d requests: %v", n.Load(), err)
			}
			return
		case <-frozen:
		}
		if got := r.redacted(t); got.Rows > 0 || got.Remains > 0 || len(got.Unread) > 0 {
			t.Errorf("request %d: the last scan finds %+v", step, got)
		}
		close(thaw)
		if err := <-ended; err == nil && step > 1 {
			t.Errorf("request %d: the exporter that froze completed its export", step)
		} else if err == nil { // it had not begun, and exports what the erasure left
			if _, err := r.Sweep(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		r.onlyComplete(t, backend, "after a thaw")
		if t.Failed() {
			t.Fatalf("frozen at request %d", step)
		}
	}
}
