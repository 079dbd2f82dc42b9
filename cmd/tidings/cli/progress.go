package cli

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"

	"github.com/tidings/tidings/ops/replay"
)

const (
	barInterval  = 100 * time.Millisecond
	lineInterval = 5 * time.Second
)

// newBar returns a progress bar on a terminal. total is -1 if it is unknown.
func newBar(w io.Writer, total int64, unit string) *progressbar.ProgressBar {
	return progressbar.NewOptions64(total, progressbar.OptionSetWriter(w), progressbar.OptionShowCount(), progressbar.OptionShowIts(),
		progressbar.OptionSetItsString(unit), progressbar.OptionClearOnFinish(), progressbar.OptionUseANSICodes(true),
		progressbar.OptionSetWidth(30))
}

// showing shows progress on stderr until stop is called: as a bar on a terminal, which draw
// updates, else as a line each lineInterval.
func (p Process) showing(total int64, unit string, draw func(*progressbar.ProgressBar), line func() string) (stop func()) {
	interval, step, clear := lineInterval, func() { fmt.Fprintln(p.Stderr, line()) }, func() {}
	if terminal(p.Stderr) {
		bar := newBar(p.Stderr, total, unit)
		interval, step = barInterval, func() { draw(bar) }
		clear = func() { _ = bar.Clear() } // a failure to draw the bar must not stop the work
		draw(bar)
	}
	done, shown := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(shown)
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				step()
			case <-done:
				clear()
				return
			}
		}
	}()
	return func() {
		close(done)
		<-shown
	}
}

// terminal reports whether w is a terminal.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// elapsed is the column of the time since start in progress lines.
func elapsed(start time.Time) string {
	return fmt.Sprintf("%6s", time.Since(start).Round(time.Second))
}

// replayBar shows progress: as a bar on a terminal, else as a line at each step and every
// lineInterval.
type replayBar struct {
	mu    sync.Mutex // a goroutine of its own reads the truth
	w     io.Writer
	bar   *progressbar.ProgressBar
	start time.Time
	next  time.Time
	step  string
}

func newReplayBar(w io.Writer) *replayBar {
	b := &replayBar{w: w, start: time.Now()}
	if terminal(w) {
		b.bar = newBar(w, -1, "events")
	}
	return b
}

func (b *replayBar) show(r replay.Progress) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	if b.bar != nil {
		b.bar.Describe(r.Step)
		if r.Total > 0 {
			b.bar.ChangeMax64(r.Total)
		}
		_ = b.bar.Set64(r.Done) // a failure to draw the bar must not stop the work
		return
	}
	if r.Step == b.step && now.Before(b.next) {
		return
	}
	b.step, b.next = r.Step, now.Add(lineInterval)
	line := fmt.Sprintf("%s  %s: %s", elapsed(b.start), r.Step, count(r.Done))
	if r.Total > 0 {
		line += " of " + count(r.Total)
	}
	fmt.Fprintln(b.w, line+" events")
}

func (b *replayBar) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bar != nil {
		_ = b.bar.Clear()
	}
}
