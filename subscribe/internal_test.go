package subscribe

import (
	"context"
	"slices"
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
	var stopped []string
	for _, name := range []string{"EVENTS-0", "EVENTS-1", "EVENTS-2"} {
		s.known[name] = time.Now()
		s.readers[name] = &reader{stop: func() { stopped = append(stopped, name) }}
	}
	delete(s.readers, "EVENTS-2") // its stream had ended, and all its events were handled
	s.done["EVENTS-2"] = true
	for range 2 {
		s.gone(context.Background(), map[int]bool{0: true})
	}
	if want := []string{"EVENTS-1"}; !slices.Equal(stopped, want) {
		t.Errorf("stopped the readers of %v, want %v", stopped, want)
	}
}
