package client

import (
	"slices"
	"strings"
	"sync"
)

// maxTokens is the number of tokens that the API takes with a read.
const maxTokens = 64

// Session calls the API like a Client, and its reads include its writes: it keeps the Tidings-Token
// of each write and sends the tokens with every read of a projection. Make one for a user, or for a
// request of theirs. It keeps the last write of each of the 64 entities that were written last.
// Earlier writes are normally in all projections by then. It is safe for concurrent use.
type Session struct {
	Calls
	tokens *tokens
}

// Session returns a session whose reads include the writes of these tokens, which are those of
// another session or of a Response.
func (c *Client) Session(seen ...string) *Session {
	t := new(tokens)
	s := &Session{tokens: t}
	if c.core != nil {
		s.Calls = newCalls(&core{c.core.settings, t})
	}
	s.Add(seen...)
	return s
}

// Token returns all tokens of the session as text. Pass it to Session in another process, for
// example the one that answers the user's next request.
func (s *Session) Token() string { return strings.Join(s.tokens.all(), ",") }

// Add makes the session's reads include the writes of these tokens too.
func (s *Session) Add(seen ...string) {
	for _, several := range seen {
		for token := range strings.SplitSeq(several, ",") {
			if token = strings.TrimSpace(token); token != "" {
				s.tokens.put(token, token, s.tokens.begin())
			}
		}
	}
}

// tokens are the tokens of a session, by the written entity. A write replaces the writes of its
// entity that had ended before its request began, and the earlier ones of the same batch. Of writes
// that overlap either may be the later one, so all are kept.
type tokens struct {
	mu    sync.Mutex
	kept  []keptToken // oldest first
	clock int         // counts requests and kept tokens
}

type keptToken struct {
	subject, token string
	began, ended   int
}

// begin returns the time of a new request, which no other request has.
func (t *tokens) begin() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.clock++
	return t.clock
}

func (t *tokens) put(subject, token string, began int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = slices.DeleteFunc(t.kept, func(k keptToken) bool {
		return k.subject == subject && (k.ended <= began || k.began == began) || k.token == token
	})
	t.clock++
	t.kept = append(t.kept, keptToken{subject, token, began, t.clock})
	if over := len(t.kept) - maxTokens; over > 0 {
		t.kept = slices.Delete(t.kept, 0, over)
	}
}

func (t *tokens) all() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make([]string, len(t.kept))
	for i, k := range t.kept {
		all[i] = k.token
	}
	return all
}
