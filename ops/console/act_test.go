package console_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"

	"github.com/tidings/tidings/internal/testkit"
)

func TestALongActIsFollowedDoneOnceAndEndsWithTheProcess(t *testing.T) {
	t.Parallel()
	h := start(t)
	var times atomic.Int64
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	t.Cleanup(release) // the console's end waits for the act
	h.console.AddAct("test.long", func(_ context.Context, progress func(done, total int64)) (string, error) {
		times.Add(1)
		progress(12_345, 99_999)
		<-goOn
		return "Did it.", nil
	})
	h.console.AddAct("test.panic", func(context.Context, func(int64, int64)) (string, error) { panic("of the test") })
	h.console.AddAct("test.error", func(context.Context, func(int64, int64)) (string, error) { return "", errors.New("of the test") })
	h.console.AddAct("test.stop", func(ctx context.Context, _ func(int64, int64)) (string, error) {
		<-ctx.Done()
		return "", context.Cause(ctx)
	})
	ada := h.signIn(t, h.Tokens.Admin)

	form := url.Values{"act_id": {uuid.NewString()}, "reason": {"r"}}
	answers := make(chan *answer, 5)
	for range cap(answers) { // the same form, five times at once
		go func() { answers <- ada.post("/console/act/test.long", form) }()
	}
	for range cap(answers) {
		a := <-answers // perhaps before the first of the five has begun
		testkit.Eventually(t, "the page shows how far the act is", func() (bool, error) {
			text := ada.get(a.path).text()
			return strings.Contains(text, "under way") && strings.Contains(text, "12,345 of 99,999"), nil
		})
	}
	release()
	path := "/console/acts/" + form.Get("act_id")
	testkit.Eventually(t, "the act ends",
		func() (bool, error) { return strings.Contains(ada.get(path).text(), "Did it."), nil })
	if n := times.Load(); n != 1 {
		t.Errorf("the act ran %d times, want once", n)
	}
	for _, name := range []string{"test.panic", "test.error"} {
		ada.act("/console/act/"+name).says("failed", "The act may be done in part", "of the test")
	}
	stopped := ada.begin("/console/act/test.stop").says("under way")
	h.stop()
	testkit.Eventually(t, "the outcome is recorded",
		func() (bool, error) { return strings.Contains(ada.get(stopped.path).text(), "failed"), nil })
	testkit.Eventually(t, "an act is refused", func() (bool, error) {
		return strings.Contains(ada.act("/console/act/test.error").text(), "This process is stopping"), nil
	})
	page(t, ada, "/console/audit").says("Nothing was done: the process was stopping.")
}
