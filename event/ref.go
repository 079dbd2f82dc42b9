package event

// Ref names an entity at one of its versions: a pair of follows, a comment, or the settings of a post's thread. Its JSON is short,
// because it travels in headers.
type Ref struct {
	Follower ID     `json:"a,omitempty"`
	Followee ID     `json:"b,omitempty"`
	Comment  string `json:"c,omitempty"`
	Thread   ID     `json:"t,omitempty"` // the post
	Version  int64  `json:"v"`
}

// Aggregate returns the aggregate type that the entity's events are of.
func (r Ref) Aggregate() string {
	switch {
	case r.Comment != "":
		return AggregateComment
	case r.Thread != 0:
		return AggregateThread
	}
	return AggregateFollow
}

// Ref names the pair as it is.
func (f Follow) Ref() Ref {
	return Ref{Follower: f.FollowerID, Followee: f.FolloweeID, Version: f.Version}
}

// Ref names the comment as it is.
func (c Comment) Ref() Ref { return Ref{Comment: c.CommentID, Version: c.Version} }

// Ref names the settings as they are.
func (t Thread) Ref() Ref { return Ref{Thread: t.PostID, Version: t.Version} }
