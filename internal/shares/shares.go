package shares

import (
	"fmt"
	"time"
)

// Resource is something that the callers of a process share.
type Resource struct {
	Name   string // the row's name in docs/security.md and in the tests
	All    Bound  // for all callers of one process
	Tenant Bound  // for one tenant
	Each   Bound  // for one token, or for one address where no token is known
	Beyond string // what happens to a caller beyond a bound
	Slow   string // what ends the hold of a slow caller
}

// Bound is how much may be held. The zero Bound is none.
type Bound struct {
	N    int64  // a fixed number, or 0
	Of   string // the units of N, in the plural
	From string // the setting whose default is N; empty: N is fixed
	Free int64  // instead of N: so many times what is free
}

// allows reports whether a caller may hold so much if so much is free for the last unit of it.
func (b Bound) allows(held, free int64) bool {
	return (b.N == 0 || held <= b.N) && (b.Free == 0 || held <= b.Free*free)
}

// String returns the text of docs/security.md.
func (b Bound) String() string {
	var text string
	switch {
	case b.Free > 1:
		return fmt.Sprintf("%d times what is free", b.Free)
	case b.Free == 1:
		return "as much as is free"
	case b.N == 0:
		return ""
	case b.Of == bytes && b.N%(1<<20) == 0:
		text = fmt.Sprintf("%d MiB", b.N>>20)
	case b.Of == bytes:
		text = fmt.Sprintf("%d KiB", b.N>>10)
	default:
		text = fmt.Sprintf("%d %s", b.N, b.Of)
	}
	if b.From != "" {
		text += " (`" + b.From + "`)"
	}
	return text
}

const bytes = "bytes"

// The slowest pace of a caller that sends a body or reads an answer: PaceBytes within PaceTime. The
// machine itself may stand still for a part of that time.
const (
	PaceBytes = 16 << 10
	PaceTime  = 5 * time.Second
)

// What the kernel keeps for a client that does not read: a send buffer, of which Linux makes twice
// as much, and for how long (on Linux).
const (
	SendBuffer = 64 << 10 // bytes
	UnreadTime = 30 * time.Second
)

// The rows of the API and its port.
var (
	Connections = Resource{
		Name: "connections", All: Bound{N: 4096, Of: "per port"},
		Each:   Bound{N: 2048, Of: "per address", From: "API_ADDRESS_CONNECTIONS"},
		Beyond: "a connection without a request in progress is closed, of the address that has most; if all work, a new one waits",
		Slow:   "the headers of a request have 5 s, an idle connection 2 minutes",
	}
	Unread = Resource{
		Name: "unread answers of a connection", Each: Bound{N: SendBuffer, Of: bytes}, // of a connection
		Beyond: "the answer waits for its reader",
		Slow:   "an answer has 5 s for each 16 KiB, then its connection is closed; the kernel keeps what is unread for 30 s",
	}
	Arrived = Resource{
		Name: "requests that arrive or are answered", All: Bound{N: 4096, Of: "requests"}, Tenant: Bound{Free: 3},
		Beyond: "503 `overloaded`",
		Slow:   "as bodies and answers",
	}
	Requests = Resource{
		Name: "requests in work", All: Bound{N: 512, Of: "requests", From: "API_MAX_REQUESTS"}, Tenant: Bound{Free: 3},
		Each:   Bound{N: 20_000, Of: "a second per token", From: "API_RATE_READ`, `API_RATE_WRITE"},
		Beyond: "503 `overloaded`, or 429 `rate-limited` beyond a rate, with `Retry-After`",
		Slow:   "`API_REQUEST_TIMEOUT`; a tenant with many slow requests may have fewer of them",
	}
	Bodies = Resource{
		Name: "bytes of bodies and answers over 64 KiB", All: Bound{N: 64 << 20, Of: bytes}, Tenant: Bound{Free: 3}, Each: Bound{Free: 1},
		Beyond: "503 `overloaded`",
		Slow:   "a body counts as it arrives, and has 5 s for each 16 KiB",
	}
	Documents = Resource{
		Name: "answers without a token", All: Bound{N: 64, Of: "answers at once"}, Each: Bound{Free: 3},
		Beyond: "503 `overloaded`",
		Slow:   "as every answer: 5 s for each 16 KiB",
	}
	Lookups = Resource{
		Name: "look-ups of tokens", All: Bound{N: 256, Of: "at once"},
		Each:   Bound{N: 100, Of: "unknown ones a second per address", From: "API_RATE_UNKNOWN"},
		Beyond: "503 `overloaded`, or 429 `rate-limited` beyond a rate",
		Slow:   "`API_REQUEST_TIMEOUT`",
	}
)

// The rows of the console.
var (
	LivePages = Resource{
		Name: "live pages of the console", All: Bound{N: 512, Of: "streams"}, Tenant: Bound{Free: 1},
		Each:   Bound{N: 32, Of: "per token"},
		Beyond: "503; the page shows the state of its last load",
		Slow:   "a message has 10 s; a reader who is late gets the newest one only",
	}
	SignIns = Resource{
		Name: "sign-ins to the console", All: Bound{N: 2, Of: "look-ups at once"},
		Each:   Bound{N: 10, Of: "unknown tokens at once per address, then one every 6 s"},
		Beyond: "429 for an unknown token; a right one still signs in",
		Slow:   "a look-up has 10 s; addresses beyond their bound share one of the two",
	}
)

// Rows of work that holds connections to the databases.
var (
	Waiting = Resource{
		Name:   "reads that wait for a projection",
		Tenant: Bound{N: 4, Of: "connections, a quarter of the pool's", From: "POSTGRES_MAX_CONNS"},
		Each:   Bound{N: 1, Of: "per entity that was written"},
		Beyond: "the read waits",
		Slow:   "`API_REQUEST_TIMEOUT`",
	}
	Writes = Resource{
		Name: "single writes that wait for a shared transaction", Tenant: Bound{N: 2048, Of: "per kind"},
		Beyond: "503 `overloaded`",
		Slow:   "a write that waits for a lock runs alone, then waits without a connection",
	}
	Exports = Resource{
		Name: "pages of exports", Tenant: Bound{N: 2, Of: "pages"},
		Beyond: "the export waits",
		Slow:   "an answer is complete after half of `API_REQUEST_TIMEOUT`, or ends there",
	}
	Rows = Resource{
		Name: "rows of one answer", Each: Bound{N: 200, Of: "per list, 500 per page of an export"},
		Beyond: "422 `validation-failed`, or the next page",
		Slow:   "`POSTGRES_STATEMENT_TIMEOUT`",
	}
)

// Table returns every row.
func Table() []Resource {
	return []Resource{Connections, Unread, Arrived, Requests, Bodies, Documents, Lookups, Waiting, Writes, Exports, Rows,
		LivePages, SignIns}
}
