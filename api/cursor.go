package api

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"slices"
	"sync"

	"github.com/tidings/tidings/event"
)

// errCursor reports a cursor that this list of this tenant did not issue, or that was changed
// since.
var errCursor = errors.New("api: invalid cursor")

const (
	cursorMACLen = 16   // bytes of the HMAC in a cursor
	maxCursorLen = 4096 // characters; the longest path of a comment takes about 2,000
)

// cursors signs and verifies cursors. A cursor has the sort values of the page's last item. So it
// remains valid whatever is written meanwhile, on every API process with the same keys. The first
// key signs; every key is accepted.
type cursors struct{ keys []*sync.Pool } // of hash.Hash: making one takes longer than a write's token

func newCursors(keys [][]byte) (c cursors) {
	for _, key := range keys {
		c.keys = append(c.keys, &sync.Pool{New: func() any { return hmac.New(sha256.New, key) }})
	}
	return c
}

// list names the list of a cursor. A cursor of another list is refused.
type list struct {
	tenant int64
	name   string   // route and order
	of     event.ID // the object of the list, or 0
}

func mac(key *sync.Pool, l list, payload []byte) []byte {
	h := key.Get().(hash.Hash)
	defer key.Put(h)
	h.Reset()
	fmt.Fprintf(h, "tidings cursor 1\n%d\n%s\n%s\n", l.tenant, l.name, l.of)
	h.Write(payload)
	return h.Sum(nil)[:cursorMACLen]
}

func (c cursors) encode(l list, last any) (string, error) {
	payload, err := json.Marshal(last)
	if err != nil {
		return "", fmt.Errorf("encode a cursor of %s: %w", l.name, err)
	}
	return base64.RawURLEncoding.EncodeToString(append(mac(c.keys[0], l, payload), payload...)), nil
}

// decode reads a cursor of encode into v, or returns errCursor.
func (c cursors) decode(l list, cursor string, v any) error {
	raw, err := base64.RawURLEncoding.Strict().DecodeString(cursor)
	if err != nil || len(raw) < cursorMACLen || len(cursor) > maxCursorLen {
		return errCursor
	}
	if !slices.ContainsFunc(c.keys, func(key *sync.Pool) bool { return hmac.Equal(raw[:cursorMACLen], mac(key, l, raw[cursorMACLen:])) }) {
		return errCursor
	}
	if err := json.Unmarshal(raw[cursorMACLen:], v); err != nil {
		return errCursor
	}
	return nil
}
