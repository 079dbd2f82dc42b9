package subscribe

import (
	"context"
	"testing"
	"time"

	"github.com/tidings/tidings/internal/testkit"
)

// TestTheReaderOfAStreamThatIsGoneStops: a reader that continues would report the missing stream
// forever, and would read a new stream of the same name beside its new reader.
func TestTheReaderOfAStreamThatIsGoneStops(t *testing.T) {
	all := &settings{name: "mailer", log: testkit.Logger(t)}
	all.streams.Name, all.streams.Prefix = "EVENTS", "events"
	s := newSubscriber(all, nil, "follow.*", nil)
	readers, begun := make(map[string]context.Context), make(chan context.Context)
	for _, name := range []string{"EVENTS-0", "EVENTS-1", "EVENTS-2"} {
		s.known[name] = time.Now()
		if name == "EVENTS-2" { // its stream had ended, and all its events were handled
			s.done[name] = true
			continue
		}
		s.readers.Start(t.Context(), name, &reader{}, func(ctx context.Context) {
			begun <- ctx
			<-ctx.Done()
		})
		readers[name] = <-begun
	}
	defer s.readers.Close()
	for range 2 {
		s.stopGone(context.Background(), map[int]bool{0: true})
	}
	for name, ctx := range readers {
		if stopped := ctx.Err() != nil; stopped != (name == "EVENTS-1") {
			t.Errorf("the reader of %s is stopped: %t", name, stopped)
		}
	}
}
