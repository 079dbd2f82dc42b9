package api

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"github.com/tidings/tidings/kinds/upstreams"
)

// declaredEvery is the least time between two reads of the upstreams, as for kinds.
const (
	declaredEvery   = 3 * time.Second
	declaredTimeout = time.Second // of a read
)

// declared has the upstreams for the documents. It is safe for concurrent use.
type declared struct {
	list func(context.Context) ([]upstreams.Upstream, error)
	log  *slog.Logger

	mu   sync.Mutex
	read time.Time
	all  []upstreams.Upstream
	tag  uint64 // of all: it rises with each change
}

// now returns the upstreams as they were at most declaredEvery ago, and their tag. While the
// database is unavailable, it returns those that were read last.
func (d *declared) now(ctx context.Context) ([]upstreams.Upstream, uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.list == nil || time.Since(d.read) < declaredEvery {
		return d.all, d.tag
	}
	ctx, cancel := context.WithTimeout(ctx, declaredTimeout)
	defer cancel()
	all, err := d.list(ctx)
	d.read = time.Now() // a failed read too: callers wait for this lock
	if err != nil {
		d.log.WarnContext(ctx, "cannot read the upstreams: the documents show those of the last read", "err", err)
		return d.all, d.tag
	}
	if !reflect.DeepEqual(all, d.all) {
		d.all, d.tag = all, d.tag+1
	}
	return d.all, d.tag
}

// perDeclared keeps what is made of the upstreams until they change. The zero value is empty.
type perDeclared[T any] struct {
	mu    sync.Mutex
	made  bool
	tag   uint64
	value T
}

func (p *perDeclared[T]) get(ctx context.Context, d *declared, make func([]upstreams.Upstream) T) T {
	all, tag := d.now(ctx)
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.made || p.tag != tag {
		p.made, p.tag, p.value = true, tag, make(all)
	}
	return p.value
}
