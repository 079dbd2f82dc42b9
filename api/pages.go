package api

import (
	linked "container/list"
	"maps"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/event"
)

const (
	pageHotAfter   = 3               // a list's first page is kept from this many requests on
	pageMaxAge     = 5 * time.Second // a page is read again after this time, even without an event
	pageMaxTracked = 4096            // lists whose requests are counted: the ones requested last
	pageOverhead   = 400             // about the bytes of a page beside its items and its cursor
	pageItemBytes  = 64              // of one Edge beside its id and its attributes
)

// The lists of a kind of edges whose first pages are kept.
const (
	listReverse = "reverse"
	listForward = "forward"
)

// pageKey names a list. It includes the tenant, so that a page of one tenant is never returned to
// another.
type pageKey struct {
	tenant int64
	kind   string
	list   string
	object event.ID
}

// Pages keeps the first pages of lists of edges that are requested often. It is a broker.Listener:
// an event that changes a page drops it.
//
// Pages receives an event before the projection has applied it. A page that is read in between is
// old, although it is read after the event. So each list has, by stream, the last event that may
// have changed it. A page is kept only if the consumer's offsets, read in the page's transaction,
// have reached all of these events. That is exact from a list's first request on. Any earlier event
// may have changed the list, so it starts with the last event of each stream, whatever its type.
//
// Pages learns the kinds of edges from the requests. An event of any other type, be it of children
// or of a kind that this process does not know yet, changes no list that was requested. The names
// in the payload are those of the kind's last request. A payload that does not have them is of
// another version of the kind: like every event that cannot be decoded, it may have changed any
// page.
//
// While Pages receives no events, it keeps nothing. Even so, plain NATS may lose events, and a
// server that hangs is noticed late. A retried dead letter, a repair or a rebuilt projection
// changes pages without an event. So no page is older than pageMaxAge. The as_of of a page is read
// with it and remains true. All methods are safe for concurrent use. A nil Pages keeps nothing.
type Pages struct {
	hits, misses prometheus.Counter
	maxBytes     int64
	maxAge       time.Duration // pageMaxAge; tests of slow machines raise it

	mu      sync.Mutex
	hearing bool
	heard   map[string]uint64          // the last event of each stream
	kinds   map[string]event.EdgeNames // the kinds whose lists were requested
	tracked map[pageKey]*linked.Element
	recent  *linked.List // of *pageList, the one requested last in front
	bytes   int64
}

// pageList is a list that was requested.
type pageList struct {
	key   pageKey
	asked int
	need  map[string]uint64 // the last event of each stream that may have changed it
	pages map[int]keptPage  // by limit
	bytes int64
}

type keptPage struct {
	EdgeList
	readAt time.Time
}

// NewPages returns a cache of cfg.PageCacheBytes. It keeps nothing until it receives events
// (broker.Listen).
func NewPages(cfg Config, reg prometheus.Registerer) *Pages {
	p := &Pages{
		maxBytes: cfg.PageCacheBytes, maxAge: pageMaxAge,
		hits: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_api_page_cache_hits_total",
			Help: "First pages of lists of edges answered from memory."}),
		misses: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_api_page_cache_misses_total",
			Help: "First pages of lists of edges read from the database."}),
	}
	reg.MustRegister(p.hits, p.misses)
	p.clear()
	return p
}

func (p *Pages) clear() {
	p.tracked, p.recent, p.bytes = make(map[pageKey]*linked.Element), linked.New(), 0
	p.kinds = make(map[string]event.EdgeNames)
}

// Begin implements broker.Listener.
func (p *Pages) Begin(last map[string]uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	p.hearing, p.heard = true, last
}

// End implements broker.Listener.
func (p *Pages) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	p.hearing = false
}

// Hear implements broker.Listener. The payload is decoded under the lock, or a list could be
// requested for the first time between the look at the kinds and the end of Hear.
func (p *Pages) Hear(e *event.Event, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	names, requested := p.kinds[e.AggregateType]
	var edge event.Edge
	if requested && err == nil {
		edge, err = e.DecodeEdge(names)
	}
	if err != nil && (requested || e.AggregateType == "") {
		p.clear()
	}
	if e.Stream == "" || !p.hearing {
		return
	}
	p.heard[e.Stream] = e.Seq
	if !requested || err != nil {
		return
	}
	for _, key := range []pageKey{{e.TenantID, e.AggregateType, listReverse, edge.To},
		{e.TenantID, e.AggregateType, listForward, edge.From}} {
		if at, ok := p.tracked[key]; ok {
			l := at.Value.(*pageList)
			l.need[e.Stream] = e.Seq
			p.drop(l)
		}
	}
}

// get returns the list's first page of limit items, if it is kept, and counts the request. names
// are those of the list's kind.
func (p *Pages) get(key pageKey, names event.EdgeNames, limit int) (EdgeList, bool) {
	if p == nil {
		return EdgeList{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kinds[key.kind] = names
	if page, ok := p.ask(key).pages[limit]; ok && time.Since(page.readAt) < p.maxAge {
		p.hits.Inc()
		return page.EdgeList, true
	}
	p.misses.Inc()
	return EdgeList{}, false
}

func (p *Pages) ask(key pageKey) *pageList {
	at, ok := p.tracked[key]
	if !ok {
		at = p.recent.PushFront(&pageList{key: key, need: maps.Clone(p.heard), pages: make(map[int]keptPage)})
		p.tracked[key] = at
		if p.recent.Len() > pageMaxTracked {
			p.forget(p.recent.Back())
		}
	}
	p.recent.MoveToFront(at)
	l := at.Value.(*pageList)
	l.asked++
	return l
}

// put keeps a page, unless it may be old. The page was read from readAt on, in a transaction that
// saw the consumer at these offsets.
func (p *Pages) put(key pageKey, limit int, page EdgeList, offsets map[string]uint64, readAt time.Time) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at, ok := p.tracked[key]
	if !p.hearing || p.maxBytes == 0 || !ok || at.Value.(*pageList).asked < pageHotAfter {
		return
	}
	l := at.Value.(*pageList)
	for stream, need := range l.need {
		if offsets[stream] < need {
			return
		}
	}
	if old, ok := l.pages[limit]; ok {
		p.count(l, -sizeOf(old.EdgeList))
	}
	l.pages[limit] = keptPage{page, readAt}
	p.count(l, sizeOf(page))
	for p.bytes > p.maxBytes {
		p.forget(p.recent.Back())
	}
}

func sizeOf(page EdgeList) int64 {
	bytes := pageOverhead + len(page.Items)*pageItemBytes + len(page.Next)
	for _, item := range page.Items {
		bytes += len(item.UserID) + len(item.attributes)
	}
	return int64(bytes)
}

func (p *Pages) count(l *pageList, bytes int64) {
	l.bytes += bytes
	p.bytes += bytes
}

func (p *Pages) drop(l *pageList) {
	p.count(l, -l.bytes)
	clear(l.pages)
}

func (p *Pages) forget(at *linked.Element) {
	l := p.recent.Remove(at).(*pageList)
	p.drop(l)
	delete(p.tracked, l.key)
}
