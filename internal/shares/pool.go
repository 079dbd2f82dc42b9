package shares

import "sync"

// Pool counts who holds how much of a resource. It is safe for concurrent use.
type Pool struct {
	of  Resource
	all int64

	mu      sync.Mutex
	held    int64
	tenants map[int64]int64
	each    map[owner]int64
}

// owner is a token of a tenant by its name, or an address of tenant 0.
type owner struct {
	tenant int64
	name   string
}

// NewPool returns a pool of all units of r, which is r.All.N unless a setting says otherwise.
func NewPool(r Resource, all int64) *Pool {
	return &Pool{of: r, all: all, tenants: make(map[int64]int64), each: make(map[owner]int64)}
}

// Hold is what one request or connection holds of a pool. One goroutine at a time uses it.
type Hold struct {
	pool  *Pool
	owner owner
	n     int64
}

// Hold returns a hold of nothing. each is the token's name, or the address of a caller without a
// token. Tenant 0 stands for callers without a tenant: they have no bound per tenant. An empty each
// has no bound of its own.
func (p *Pool) Hold(tenant int64, each string) *Hold {
	return &Hold{pool: p, owner: owner{tenant, each}}
}

// Take takes n more. It returns false and takes nothing if that exceeds a bound.
func (h *Hold) Take(n int64) bool {
	p := h.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	free := p.all - p.held - n + 1 // before the last of them
	switch {
	case free < 1,
		h.owner.tenant != 0 && !p.of.Tenant.allows(p.tenants[h.owner.tenant]+n, free),
		h.owner.name != "" && !p.of.Each.allows(p.each[h.owner]+n, free):
		return false
	}
	p.add(h, n)
	return true
}

// Release gives back everything. A second call does nothing.
func (h *Hold) Release() {
	h.pool.mu.Lock()
	defer h.pool.mu.Unlock()
	h.pool.add(h, -h.n)
}

func (p *Pool) add(h *Hold, n int64) {
	h.n += n
	p.held += n
	if p.tenants[h.owner.tenant] += n; p.tenants[h.owner.tenant] == 0 {
		delete(p.tenants, h.owner.tenant)
	}
	if p.each[h.owner] += n; p.each[h.owner] == 0 {
		delete(p.each, h.owner)
	}
}

// Held returns how much all callers hold.
func (p *Pool) Held() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held
}
