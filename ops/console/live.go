package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tidings/tidings/internal/tokens"
)

const (
	liveEvery   = time.Second      // between two reads of a page, for any number of readers
	beatEvery   = 15 * time.Second // a comment on a stream without messages, so that the server notices a closed connection
	streamWrite = 10 * time.Second // limit for one message to a slow reader
	checkWait   = 3 * time.Second  // for the check of a stream's session; then PostgreSQL counts as silent
	maxFeeds    = 64               // different live pages that readers watch at once,
	tenantFeeds = maxFeeds / 8     // of these for one tenant,
	othersFeeds = maxFeeds / 2     // and for all tenants; operators have the rest
)

// hub reads each live page once a second while somebody watches it, and sends changes to all its
// readers.
type hub struct {
	c     *Console
	every time.Duration
	wake  map[bool]chan struct{} // a reader began to watch: an operator (true), or one of a tenant
	mu    sync.Mutex
	feeds map[string]*feed
	over  chan struct{} // closed when the hub has ended
}

// feed is one live page for readers of one tenant with the same roles and the same query.
type feed struct {
	page    *page
	view    *view
	viewers map[chan struct{}]bool
	reading
}

// reading is what the hub knows of a page.
type reading struct {
	html    []byte
	at      time.Time // when the last reading began that succeeded
	trouble string    // why there is no newer one; empty: there is
}

func newHub(c *Console) *hub {
	return &hub{c: c, every: liveEvery, wake: map[bool]chan struct{}{true: make(chan struct{}, 1), false: make(chan struct{}, 1)},
		feeds: make(map[string]*feed), over: make(chan struct{})}
}

// watch subscribes to a live page. The channel tells that newest returns another reading: a slow
// reader misses earlier ones. stop ends the subscription. ok is false if there are too many feeds.
func (h *hub) watch(v *view, p *page) (changed <-chan struct{}, newest func() reading, stop func(), ok bool) {
	roles := slices.Clone(v.who.Roles)
	slices.Sort(roles)
	key := fmt.Sprintf("%s %d %s %s", p.name(), v.who.TenantID, strings.Join(roles, ","), v.r.URL.Query().Encode())
	ch := make(chan struct{}, 1)
	h.mu.Lock()
	defer h.mu.Unlock()
	f := h.feeds[key]
	if f == nil {
		if !h.room(v) {
			return nil, nil, nil, false
		}
		r := (&http.Request{Method: http.MethodGet, URL: &url.URL{Path: root + p.path,
			RawQuery: v.r.URL.RawQuery}}).WithContext(context.Background())
		who := v.who
		who.Name = "live"
		f = &feed{page: p, view: &view{c: h.c, r: r, who: who}, viewers: make(map[chan struct{}]bool)}
		h.feeds[key] = f
	}
	if f.html != nil {
		ch <- struct{}{}
	}
	f.viewers[ch] = true
	select {
	case h.wake[v.who.System()] <- struct{}{}:
	default:
	}
	newest = func() reading {
		h.mu.Lock()
		defer h.mu.Unlock()
		return f.reading
	}
	return ch, newest, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(f.viewers, ch)
		if len(f.viewers) == 0 {
			delete(h.feeds, key)
		}
	}, true
}

// room reports whether the view may open another feed. The caller holds h.mu.
func (h *hub) room(v *view) bool {
	tenant, others := 0, 0
	for _, f := range h.feeds {
		if f.view.who.System() {
			continue
		}
		others++
		if f.view.who.TenantID == v.who.TenantID {
			tenant++
		}
	}
	return len(h.feeds) < maxFeeds && (v.who.System() || tenant < tenantFeeds && others < othersFeeds)
}

// run reads the pages of operators and those of tenants beside each other: a tenant's slow page
// delays no operator.
func (h *hub) run(ctx context.Context) {
	defer close(h.over)
	var both sync.WaitGroup
	for system, wake := range h.wake {
		both.Go(func() { h.readAll(ctx, system, wake) })
	}
	both.Wait()
}

// readAll reads the watched pages of operators, or of tenants, one after the other in each round.
func (h *hub) readAll(ctx context.Context, system bool, wake <-chan struct{}) {
	tick := time.NewTicker(h.every)
	defer tick.Stop()
	for {
		if len(h.watched(system)) == 0 {
			select {
			case <-wake:
			case <-ctx.Done():
				return
			}
		}
		for _, f := range h.watched(system) {
			h.refresh(ctx, f)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

func (h *hub) watched(system bool) (feeds []*feed) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.feeds {
		if f.view.who.System() == system {
			feeds = append(feeds, f)
		}
	}
	return feeds
}

// refresh reads a page and tells its readers.
func (h *hub) refresh(ctx context.Context, f *feed) {
	began := time.Now()
	html, trouble := h.read(ctx, f)
	if ctx.Err() != nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if f.trouble = trouble; trouble == "" {
		f.html, f.at = html, began
	}
	for ch := range f.viewers {
		select {
		case ch <- struct{}{}:
		default: // the reader has not taken the last reading
		}
	}
}

// read renders the page's live part, or a lasting problem in its place. If a server does not
// answer, it returns the trouble: readers keep the last content.
func (h *hub) read(ctx context.Context, f *feed) (html []byte, trouble string) {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	data, err := f.page.data(ctx, f.view)
	name := "live"
	fr := &frame{Title: f.page.title, Page: f.page, View: f.view, Data: data}
	if err != nil {
		p, logged := problemOf(err)
		if logged && !errors.Is(err, context.Canceled) {
			h.c.log.WarnContext(ctx, "live page failed", "page", f.page.name(), "err", err, "runbook", "ConsoleFails")
		}
		if p.Status == http.StatusServiceUnavailable {
			return nil, p.Title
		}
		name, fr.Data = "trouble", p
	}
	var b bytes.Buffer
	t := h.c.templates[f.page.name()]
	if err := errors.Join(t.ExecuteTemplate(&b, "health", fr), t.ExecuteTemplate(&b, name, fr)); err != nil {
		h.c.log.ErrorContext(ctx, "live page not rendered", "page", f.page.name(), "err", err, "runbook", "ConsoleFails")
		return nil, "The console failed"
	}
	return b.Bytes(), ""
}

var errTooManyLive = &problem{http.StatusServiceUnavailable, "Too many live pages", "Reload the page to see its current state."}

// sse writes server-sent events. Its methods report whether the reader can take more.
type sse struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
}

func (s sse) send(text string) bool {
	if err := s.ctl.SetWriteDeadline(time.Now().Add(streamWrite)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return false
	}
	_, err := s.w.Write([]byte(text))
	return err == nil && s.ctl.Flush() == nil
}

func (s sse) message(event, data string) bool {
	lines := strings.ReplaceAll(strings.ReplaceAll(data, "\r", ""), "\n", "\ndata: ")
	return s.send("event: " + event + "\ndata: " + lines + "\n\n")
}

func (c *Console) checkSession(r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), checkWait)
	defer cancel()
	_, _, err := c.session(r.WithContext(ctx))
	return err
}

// stream sends a live page as server-sent events: its content when that changes, "fresh" with the
// age in milliseconds of each reading, and "trouble" if there is no newer one. It sends no content
// while it cannot check the session. It ends when the reader leaves, the session ends or the
// process stops.
func (c *Console) stream(v *view, p *page) error {
	if !v.may(p) {
		return c.refused(v, p)
	}
	if !p.isLive(v) {
		return errNotFound
	}
	share := c.streams.Hold(v.who.TenantID, v.who.Name)
	if !share.Take(1) {
		return errTooManyLive
	}
	defer share.Release()
	changed, newest, stop, ok := c.live.watch(v, p)
	if !ok {
		return errTooManyLive
	}
	defer stop()
	out := sse{v.w, http.NewResponseController(v.w)}
	v.w.Header().Set("Content-Type", "text/event-stream")
	v.w.Header().Set("X-Accel-Buffering", "no") // proxies must not buffer the stream
	if !out.send(": looking\n\n") {
		return nil
	}
	var sent []byte
	unchecked := false
	beat, check := time.NewTicker(beatEvery), time.NewTicker(lookupTTL)
	defer beat.Stop()
	defer check.Stop()
	for {
		good := true
		select {
		case <-changed:
			now := newest()
			switch {
			case unchecked:
			case now.trouble != "":
				good = out.message("trouble", now.trouble)
			default:
				if !bytes.Equal(now.html, sent) {
					sent, good = now.html, out.message("message", string(now.html))
				}
				good = good && out.message("fresh", fmt.Sprint(time.Since(now.at).Milliseconds()))
			}
		case <-beat.C:
			good = out.send(":\n\n")
		case <-check.C:
			err := c.checkSession(v.r)
			if unchecked = err != nil; unchecked {
				good = !errors.Is(err, tokens.ErrUnauthenticated) && out.message("trouble", postgresSilent)
			}
		case <-v.r.Context().Done():
			good = false
		case <-c.live.over:
			good = false
		}
		if !good {
			return nil
		}
	}
}
