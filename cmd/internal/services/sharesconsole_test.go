package services

import (
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/shares"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/internal/tokens"
)

// signIn sends a token to the console, and returns the status and the cookie of the session.
func (a *attacked) signIn(token string) (status int, session *http.Cookie) {
	a.t.Helper()
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout: time.Minute}
	res, err := client.PostForm("http://"+a.desk+"/console/sign-in", url.Values{"token": {token}})
	if err != nil {
		a.t.Fatal(err)
	}
	defer res.Body.Close()
	for _, c := range res.Cookies() {
		session = c
	}
	return res.StatusCode, session
}

// openLive opens a live page of the console. It stays open until close.
func (a *attacked) openLive(session *http.Cookie) (status int, close func()) {
	a.t.Helper()
	req, err := http.NewRequestWithContext(a.t.Context(), "GET", "http://"+a.desk+"/console/live/overview", nil)
	if err != nil {
		a.t.Fatal(err)
	}
	req.AddCookie(session)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		a.t.Fatal(err)
	}
	return res.StatusCode, func() { _ = res.Body.Close() } // it has nothing to write
}

// A token opens live pages and reads none of them.
func openLivePages(a *attacked) {
	a.awaitDesk()
	_, greedy := a.signIn(a.greedy)
	_, modest := a.signIn(a.modest)
	if greedy == nil || modest == nil {
		a.t.Fatal("no session")
	}
	opened := 0
	for range 2 * shares.LivePages.Each.N {
		status, closeIt := a.openLive(greedy)
		defer closeIt()
		if status == http.StatusOK {
			opened++
		}
	}
	if int64(opened) != shares.LivePages.Each.N {
		a.t.Errorf("a token opens %d live pages, want %d", opened, shares.LivePages.Each.N)
	}
	status, closeIt := a.openLive(modest)
	defer closeIt()
	if status != http.StatusOK {
		a.t.Errorf("a live page of another tenant: status %d", status)
	}
}

// An address sends wrong tokens. Those with a right token have the same address, as behind a proxy.
func wrongTokens(a *attacked) {
	a.awaitDesk()
	last := 0
	for range 3 * shares.SignIns.Each.N {
		last, _ = a.signIn(tokens.New())
	}
	if last != http.StatusTooManyRequests && last != http.StatusUnauthorized { // 401 if the machine was slow
		a.t.Errorf("a wrong token: status %d", last)
	}
	if status, session := a.signIn(a.modest); status != http.StatusSeeOther || session == nil {
		a.t.Errorf("a right token beside wrong ones: status %d", status)
	}
}

// awaitDesk waits until the console listens, which it does after the API.
func (a *attacked) awaitDesk() {
	a.t.Helper()
	testkit.Eventually(a.t, "the console to listen", func() (bool, error) {
		res, err := http.Get("http://" + a.desk + "/console/sign-in")
		if err != nil && strings.Contains(err.Error(), "refused") {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		return res.StatusCode == http.StatusOK, res.Body.Close()
	})
}
