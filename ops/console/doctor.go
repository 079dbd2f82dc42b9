package console

import (
	"context"
	"net/url"
	"slices"
	"strings"

	"github.com/tidings/tidings/ops/doctor"
)

// repairs are the acts that repair a finding, by the command that its remedy is.
var repairs = map[string]string{"tidings resume --consumer ": actResume, "tidings replay --consumer ": actReplay}

// repair is the act that repairs a finding, and its input.
type repair struct {
	Act string
	In  url.Values
}

// repairOf returns the act that repairs the finding, nil if the console has none.
func repairOf(f doctor.Finding) *repair {
	for command, act := range repairs {
		if consumer, is := strings.CutPrefix(f.Repair, command); is {
			return &repair{act, values("consumer", consumer)}
		}
	}
	return nil
}

// titleOf returns the title of the page at a URL of the console.
func (c *Console) titleOf(to string) string {
	path, _, _ := strings.Cut(strings.TrimPrefix(to, root), "?")
	i := slices.IndexFunc(c.pages, func(p *page) bool { return p.path == path })
	return c.pages[max(i, 0)].title
}

type doctorPage struct {
	Trees            []doctor.Tree
	Errors, Warnings int // root causes
}

func (c *Console) doctorData(ctx context.Context, _ *view) (any, error) {
	now, err := c.observer.state(ctx, true)
	if err != nil {
		return nil, err
	}
	if now.Probed.Err != nil {
		return nil, now.Probed.Err
	}
	p := doctorPage{Trees: now.Trees()}
	for _, f := range p.Trees {
		if f.Severity == doctor.Error {
			p.Errors++
		} else {
			p.Warnings++
		}
	}
	return p, nil
}
