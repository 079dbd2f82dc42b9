package api

func wordsOfFollows() kindWords {
	const nobody = "From a projection. A user that nobody knows has none."
	return kindWords{
		operations: map[string]words{
			"put":    {"follow", "Make one user follow another", "201 when that changed something, 200 when they did already; then there is no event."},
			"get":    {"get-follow", "Read a follow", "From the truth. 404 when the one does not follow the other, whether or not they ever did."},
			"remove": {"unfollow", "Make one user follow another no more", "204 also when they did not; then there is no event."},
			"batch":  {"batch-follows", "Follow and unfollow up to 1000 times", ""},
			"check": {"check-follows", "Ask of up to 500 pairs whether the one follows the other",
				"Both ways, from a projection. A user follows nobody that nobody knows, nor themself."},
			"reverse": {"list-followers", "List who follows a user, newest first", nobody},
			"forward": {"list-following", "List whom a user follows, newest first", nobody},
			"counts":  {"get-counts", "Count a user's followers and followings", "From a projection. A user that nobody knows has 0."},
			"versions": {"list-follow-versions", "List the versions of a follow, newest first",
				"Who did what, when: each follow and each unfollow of the pair. A pair that never was has none." + fromTheHistory},
		},
		schemas: map[string]string{"Pair": "Pair", "CheckInputBody": "CheckInputBody", "Relation": "Relation", "RelationList": "RelationList",
			"EdgeList": "EdgeList", "Counts": "Counts"},
		names: map[string]string{"active": "following", "reversed": "followed_by", "put": "follow", "remove": "unfollow"},
		texts: map[string]string{"put 200": "They did already.", "outcome": "After a follow: the pair.", "following": "follower_id follows followee_id.", "followed_by": "followee_id follows follower_id.",
			"positioned_at": "When following last became true; absent unless it is."},
		codes: map[string]string{codeSelfEdge: codeSelfFollow},
	}
}
