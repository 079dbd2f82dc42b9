package api_test

import (
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/event"
)

// wantKept checks the followers' rows, and returns the number of events.
func wantKept(t *testing.T, system *pgxpool.Pool, followers map[event.ID]bool) (events int) {
	t.Helper()
	var ids []event.ID
	for id := range followers {
		ids = append(ids, id)
	}
	var rows int
	if err := system.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM follows WHERE follower_id = ANY($1)), (SELECT count(*)
		FROM outbox_messages)`, ids).
		Scan(&rows, &events); err != nil {
		t.Fatal(err)
	}
	if rows != len(ids) {
		t.Errorf("%d rows of %d accepted follows", rows, len(ids))
	}
	return events
}

// slowReader is a client that reads the headers at once, and the body later.
type slowReader struct {
	*httptest.ResponseRecorder
	writing chan<- struct{}
	read    <-chan struct{}
}

func (s slowReader) Write(b []byte) (int, error) {
	s.writing <- struct{}{}
	<-s.read
	return s.ResponseRecorder.Write(b)
}

// Clients that do not read their answers, more than the API admits at once, keep no other client
// out.
func TestClientsThatDoNotTakeTheirAnswersKeepNobodyOut(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.want(t, 201, "PUT", "/v1/follows/1/2", "")
	writing, read := make(chan struct{}), make(chan struct{})
	var clients sync.WaitGroup
	for range config().MaxRequests + 1 {
		clients.Go(func() {
			r := httptest.NewRequestWithContext(t.Context(), "GET", "/v1/follows/1/2", nil)
			r.Header.Set("Authorization", "Bearer "+f.token)
			f.ServeHTTP(slowReader{httptest.NewRecorder(), writing, read}, r)
		})
		<-writing // one after the other, so none is refused
	}
	f.want(t, 200, "GET", "/v1/follows/1/2", "")
	close(read)
	clients.Wait()
}
