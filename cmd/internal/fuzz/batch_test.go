package fuzz_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/event"
)

// operation is one operation of a batch: a write, or a text that the API refuses.
type operation struct {
	write
	raw    string
	status int // status of raw
	code   string
}

func (o operation) text() string {
	if o.plan == nil {
		return o.raw
	}
	return encode(o.op)
}

// operations returns writes of one kind. With distinct, each is of another entity, and creates have
// keys.
func (l *lane) operations(n int, distinct bool) (path string, all []operation) {
	seen := map[string]bool{}
	if l.chance(2) {
		k := l.edgeKind()
		for tries := 0; len(all) < n && tries < 4*n; tries++ {
			from, to := l.ends(k)
			w := l.edgeWriteOf(k, from, to)
			if key := fmt.Sprint(from, "/", to); w.op != nil && !(distinct && seen[key]) {
				seen[key] = true
				all = append(all, operation{write: w})
			}
		}
		return "/v1/" + k.Plural + ":batch", all
	}
	k := l.childKind(anyKind)
	creates, only := l.chance(2), k.OnePerAuthor // whether the operation that frees a place or the one that takes it runs first is open
	if creates && only && !distinct {
		n += 10 // several for one place, some with the same key
	}
	for tries := 0; len(all) < n && tries < 4*n; tries++ {
		r := l.child(anyKind)
		var w write
		switch {
		case creates && (only || l.chance(2)) || r == nil:
			w = l.create(k)
			if only && l.chance(2) {
				c := newChild{k: k, object: event.IDOf(1 + l.rng.Int64N(3)), author: event.IDOf(1 + l.rng.Int64N(3)), body: l.text("place"),
					values: l.values(k.Attributes, false)}
				if l.chance(2) {
					c.key = fmt.Sprint("key-", l.rng.IntN(3))
				}
				w = l.createOf(c)
			}
			if distinct {
				c := newChild{k: k, object: l.object(), author: l.user(), body: l.text("cut"),
					key: fmt.Sprint("cut-", l.requests.Load(), "-", tries)}
				if len(k.Attributes) > 0 {
					c.values = l.values(k.Attributes, false)
				}
				if place := fmt.Sprint(c.object, "/", c.author); only && seen[place] {
					continue
				} else {
					seen[place] = true
				}
				w = l.createOf(c)
			}
		case r.k.Name != k.Name || distinct && seen[r.now().ID] || creates && only:
			continue
		default:
			w = l.change(r)
			seen[r.now().ID] = true
		}
		if w.op != nil {
			all = append(all, operation{write: w})
		}
	}
	return "/v1/" + k.Plural + ":batch", all
}

// broken returns an operation that the API refuses alone.
func (l *lane) broken(lines bool) operation {
	if lines && l.chance(2) {
		return operation{raw: pick(l, "", "{", "\"\xff\"", `{"op":"create"}{}`, `{"op":"edit","op":"edit"}`),
			status: http.StatusBadRequest, code: "json-invalid"}
	}
	return operation{raw: pick(l, `{"op":"none"}`, `[]`, `null`, `{"op":5}`, `{"op":"delete","x":1}`, `{"op":"put"}`,
		`{"op":"put","follower_id":"a b","followee_id":"*"}`),
		status: http.StatusUnprocessableEntity, code: "validation-failed"}
}

func bodyOf(all []operation, lines bool) (body, media string) {
	texts := make([]string, len(all))
	for i, o := range all {
		texts[i] = o.text()
	}
	if lines {
		return strings.Join(texts, "\n") + "\n", "application/x-ndjson"
	}
	return `{"operations":[` + strings.Join(texts, ",") + "]}", "application/json"
}

// batch sends many operations in one request, and compares each result.
func (l *lane) batch() error {
	n := 1 + l.rng.IntN(8)
	if l.chance(15) {
		n = 90 + l.rng.IntN(130)
	}
	path, all := l.operations(n, false)
	lines := l.chance(2)
	if len(all) == 0 || l.chance(3) {
		all = slices.Insert(all, l.rng.IntN(len(all)+1), l.broken(lines))
	}
	body, media := bodyOf(all, lines)
	l.acting = l.actor()
	a, err := l.call(http.MethodPost, path, body, "Content-Type: "+media, "Tidings-Actor: "+l.acting)
	if err == nil {
		err = a.expect(http.StatusOK, "")
	}
	if err != nil {
		return err
	}
	items, err := itemsOf(a, lines)
	if err != nil || len(items) != len(all) {
		return fmt.Errorf("%s: %d outcomes of %d: %w", a.request, len(items), len(all), err)
	}
	for i, item := range items {
		if err := l.equalItem(all[i], item, i, lines); err != nil {
			return fmt.Errorf("operation %d of %d, %s: %w", i, len(all), all[i].text(), err)
		}
	}
	return nil
}

func itemsOf(a answer, lines bool) (items []map[string]any, err error) {
	if !lines {
		var doc struct{ Items []map[string]any }
		err = json.Unmarshal(a.body, &doc)
		return doc.Items, err
	}
	for d := json.NewDecoder(bytes.NewReader(a.body)); ; {
		var item map[string]any
		if err := d.Decode(&item); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return items, err
		}
		items = append(items, item)
	}
}

func (l *lane) equalItem(o operation, item map[string]any, at int, lines bool) error {
	status, _ := item["status"].(float64)
	a := answer{request: "an operation", status: int(status), body: []byte(encode(item))}
	a.json, _ = item["problem"].(map[string]any)
	if lines {
		if err := differ(a, float64(at+1), item["line"]); err != nil {
			return err
		}
	}
	if o.plan == nil {
		return a.expect(o.status, o.code)
	}
	if a.status == http.StatusServiceUnavailable && (a.code() == "overloaded" || a.code() == "thread-returning") {
		return nil // the API did not do it
	}
	want := o.plan()
	entity, _ := item[o.noun].(map[string]any)
	token, _ := item["token"].(string)
	return errors.Join(l.settle(a, want, entity, token), differ(a, want.replayed, item["replayed"] == true))
}

// cutBatch breaks the connection within a batch or its answer, and finds out which operations
// happened. Each happens completely or not at all, and none of a batch that did not arrive.
func (l *lane) cutBatch() error {
	path, all := l.operations(1+l.rng.IntN(pick(l, 5, 5, 5, 250)), true)
	if len(all) == 0 {
		return nil
	}
	lines := l.chance(2)
	body, media := bodyOf(all, lines)
	actor := l.actor()
	id := fmt.Sprintf("cut-%d-%d", l.tenant, l.requests.Add(1))
	l.total.Add(1)
	head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nX-Request-Id: %s\r\nTidings-Actor: "+
		"%s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n",
		path, l.all, id, actor, media, len(body))
	sent := l.rng.IntN(len(head) + len(body))
	if !l.chance(4) {
		sent = len(head) + len(body)
	}
	ended := l.flight.await(id)
	u, err := url.Parse(pick(l, l.urls...))
	if err != nil {
		return err
	}
	if err := sendSome(u.Host, (head + body)[:sent], l.rng.IntN(pick(l, 1, 300, 20_000))); err != nil {
		return err
	}
	if sent >= len(head) {
		select {
		case <-ended:
		case <-l.ctx.Done():
			return l.ctx.Err()
		case <-time.After(2 * time.Minute):
			return fmt.Errorf("a batch of %d operations that was cut after %d bytes has not ended", len(all), sent)
		}
	}
	for i, o := range all {
		if err := l.lookUp(o, actor, sent == len(head)+len(body)); err != nil {
			return fmt.Errorf("operation %d of %d, cut after %d of %d bytes: %s: %w", i, len(all), sent, len(head)+len(body), o.text(), err)
		}
	}
	return nil
}

// sendSome sends a text, reads some bytes of the answer, and breaks the connection.
func sendSome(host, text string, read int) error {
	conn, err := net.Dial("tcp", host)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		return err
	}
	if _, err := conn.Write([]byte(text)); err != nil {
		return err
	}
	if read > 0 && strings.HasSuffix(text, "}") || strings.HasSuffix(text, "\n") && !strings.HasSuffix(text, "\r\n") {
		_, _ = conn.Read(make([]byte, max(1, read))) // up to so many bytes
	}
	return nil
}

// lookUp finds out whether an operation happened, as a client would: a create by its key, any other
// by the entity's state.
func (l *lane) lookUp(o operation, actor string, arrived bool) error {
	l.acting = actor
	want := o.plan()
	if want.code != "" || want.commit == nil {
		return nil
	}
	if o.method == http.MethodPost {
		return l.sendAgain(o, actor, arrived)
	}
	a, err := l.call(http.MethodGet, o.path, "")
	if err != nil {
		return err
	}
	version, _ := a.json["version"].(float64)
	ref := want.ref()
	gone := a.status == http.StatusNotFound && o.method == http.MethodDelete
	row, edge := ref.row.(*edgeRow)
	if a.status == http.StatusNotFound && edge && !gone && !row.now().Active() {
		return nil // the put did not happen
	}
	if !gone {
		if err := a.expect(http.StatusOK, ""); err != nil {
			return err
		}
	}
	if !gone && int64(version) == ref.version {
		return nil // did not happen; the next reads compare the state
	}
	if !arrived {
		return fmt.Errorf("it happened, but its batch did not arrive: %s", a.body)
	}
	var entity map[string]any
	if !gone {
		entity = a.json
	}
	if child, ok := ref.row.(*childRow); ok {
		want.commit(wishOf(child.k.Names().ID, entity))
		return differ(a, any(renderChild(child.k, child.now(), false)), any(a.json))
	}
	want.commit(wishOf("", entity))
	if gone {
		return nil
	}
	return differ(a, any(renderEdge(row.k, row.now())), any(a.json))
}

// sendAgain creates with a key that the batch may have used.
func (l *lane) sendAgain(o operation, actor string, arrived bool) error {
	again := l.actor()
	a, err := l.call(o.method, o.path, encode(o.body), append(o.headers, "Tidings-Actor: "+again)...)
	if err != nil {
		return err
	}
	if done := a.header.Get("Idempotency-Replayed") == "true"; done && !arrived {
		return fmt.Errorf("it happened, but its batch did not arrive: %s", a.body)
	} else if !done {
		actor = again
	}
	l.acting = actor
	return l.settle(a, o.plan(), a.json, a.header.Get("Tidings-Token"))
}
