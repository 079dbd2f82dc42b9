package clienttest_test

import (
	"context"
	"fmt"
	"log"
	"testing"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/client/clienttest"
)

// example plays the test in examples, which have none.
type example struct{ testing.TB }

func (example) Helper()                           {}
func (example) Cleanup(func())                    {}
func (example) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }
func (example) Fatal(args ...any)                 { log.Fatal(args...) }

var t example // in a test, its *testing.T

func ExampleNew() {
	c := clienttest.New(t)
	defer c.Close() // a test does not need this
	follow, err := c.Follows.Put(context.Background(), "7", "42")
	fmt.Println(follow.FollowerID, follow.FolloweeID, err)
	// Output: 7 42 <nil>
}

func ExampleNewTenant() {
	tenant := clienttest.NewTenant(t)
	reader := tenant.Client(t, tenant.Token(t, "read"))
	defer reader.Close()
	_, err := reader.Follows.Put(context.Background(), "7", "42")
	fmt.Println(client.IsForbidden(err))
	// Output: true
}

func ExampleApplyKinds() {
	clienttest.ApplyKinds(t, blocks) // YAML
	c := clienttest.New(t)
	defer c.Close()
	visit, err := c.Edges("visit").Put(context.Background(), "7", "5")
	fmt.Println(visit.From, visit.To, err)
	// Output: 7 5 <nil>
}

func ExampleDatabase() {
	url := clienttest.Database(t) // for the tables of a subscriber
	fmt.Println(url != "")
	// Output: true
}
